"""Ports of a sandbox: connections to what listens there, addresses here that lead there.

Owns: a connection's two directions and its end, the local listener. Does not own: the
stream protocol (:mod:`libdsec._operation`) or HTTP (:mod:`libdsec._http`).

The sandbox connects nowhere: connections are made by this side only, to the sandbox's own
loopback interface.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from libdsec import _flow, _ids
from libdsec._core import Core
from libdsec._operation import Operation
from libdsec._wire import CONNECT_WINDOW_BYTES, ConnectReply, ConnectRequest
from libdsec.args import Seconds, seconds
from libdsec.errors import Conflict, DSecError, InvalidRequest, StdinClosed, Unsupported, port_error

if TYPE_CHECKING:
    from httpx import AsyncClient

READ_BYTES = 64 * 1024
LINGER_S = 5.0
"""How long a closed connection waits for the other end to take what was written."""
LOCAL_BACKLOG = 128
LOCAL_HOST = "127.0.0.1"

R = TypeVar("R", bound=msgspec.Struct)

OnError = Callable[[DSecError], None]
"""Told why a connection failed; whoever made it here sees a reset."""


class Dialled(Operation[ConnectReply]):
    """The operation of one connection: smaller windows, an output that ends by itself."""

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        self.attended = True  # the edge asks whether we are there
        self.receiving = _flow.Receiving(ack_every=CONNECT_WINDOW_BYTES // 4)
        self.sending = _flow.Sending(window=CONNECT_WINDOW_BYTES)
        self.output_ended = False
        self._known = False

    def on_frame(self, kind: str, data: bytes, offset: int | None) -> None:
        super().on_frame(kind, data, offset)
        self._known = self._known or kind == "r"
        self._heard = self._known  # before that nothing was sent, and it may begin anew
        if kind == "d" and not self.receiving.complete(offset):
            self.reattach()
        elif kind == "d":
            self.output_ended = True
            self._changed.set()

    async def connected(self) -> None:
        """Returns when the connection is there. Raises why it is not."""
        while not self._ready and not self.done:
            await self.changed()
        if not self._ready:
            await self.final()


class Connection:
    """A connection to a port of a sandbox. An async iterator of bytes as they come;
    ``async with`` closes it, or resets it where the block raised."""

    def __init__(self, operation: Dialled, port: int, core: Core) -> None:
        self._operation = operation
        self._core = core
        self._rest = b""
        self._counted = 0  # of the rest, what the node was told of already
        self.port = port

    def __repr__(self) -> str:
        return f"Connection(port={self.port}, {'over' if self._operation.done else 'open'})"

    @property
    def readable(self) -> bool:
        """Whether :meth:`read` returns at once: there is something, or the end."""
        op = self._operation
        return bool(self._rest or op.output or op.output_ended or op.done)

    async def read(self, limit: int = READ_BYTES) -> bytes:
        """What came, at most ``limit`` bytes, as soon as there is something; nothing at
        the end. Raises ``PortReset`` where it broke off, ``SandboxDied``."""
        op = self._operation
        while not self._rest and not op.output:
            if op.output_ended:
                return b""
            if op.done:
                self._checked(await self._final())
                return b""
            await op.changed()
        data = self._rest or op.output.popleft()[1]
        data, self._rest = data[:limit], data[limit:]
        fresh = max(0, len(data) - self._counted)
        self._counted -= len(data) - fresh
        try:
            await op.taken(fresh)
        except BaseException:  # it is given to whoever reads next
            self._rest, self._counted = data + self._rest, self._counted + len(data)
            raise
        return data

    async def write(self, data: bytes) -> None:
        """Sends ``data``, as fast as the other end takes it. Raises ``StdinClosed`` after
        :meth:`close_write`, ``PortReset`` where the connection broke off."""
        try:
            await self._operation.send(data)
        except StdinClosed:
            if self._operation.done:
                self._checked(await self._final())
            raise

    async def close_write(self) -> None:
        """Ends this direction: the other end reads to its end, and can still answer.
        Idempotent."""
        await self._operation.end_input()

    async def close(self) -> None:
        """Ends both directions: what was written still arrives, what comes is dropped.
        Returns at once. Idempotent."""
        if not self._operation.done:
            self._core.background(self._linger())

    async def abort(self) -> None:
        """Resets it: the other end sees that it broke off. Idempotent."""
        await self._operation.cancel()
        self._operation.abandon()

    async def _linger(self) -> None:
        op = self._operation
        try:
            async with asyncio.timeout(LINGER_S):
                await op.end_input()
                while not op.done:
                    while op.output:
                        await op.taken(len(op.output.popleft()[1]))
                    await op.changed()
        except (TimeoutError, DSecError):
            with contextlib.suppress(DSecError):
                await self.abort()

    async def _final(self) -> ConnectReply:
        try:
            return await self._operation.final()
        except DSecError as exc:
            raise port_error(exc, self.port, connected=True) from exc

    def _checked(self, reply: ConnectReply) -> None:
        if reply.error is not None:
            raise port_error(reply.error, self.port, connected=True)

    def __aiter__(self) -> Connection:
        return self

    async def __anext__(self) -> bytes:
        data = await self.read()
        if not data:
            raise StopAsyncIteration
        return data

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, type_: type[BaseException] | None, *_exc: object) -> None:
        await (self.close() if type_ is None else self.abort())


class LocalAddress(NamedTuple):
    """Where a port can be reached on this machine; as text ``host:port``."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Port:
    """A port of a sandbox as an address of this machine while it is entered. Whoever may
    open connections on this machine's loopback interface can use it."""

    def __init__(
        self, dial: Callable[[], Awaitable[Connection]], port: int, *, local: int, eager: bool,
        on_error: OnError | None = None,
    ) -> None:  # fmt: skip
        self._dial = dial
        self._local = local
        self._eager = eager
        self._on_error = on_error
        self._spare: Connection | None = None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._error: DSecError | None = None
        self.port = port

    def __repr__(self) -> str:
        where = self.address if self._server is not None else "closed"
        return f"Port({self.port}, {where})"

    @property
    def address(self) -> LocalAddress:
        """Where it can be reached. Raises ``Conflict`` where it is not entered."""
        if self._server is None:
            raise Conflict("the port is not open here", field="port")
        host, port = self._server.sockets[0].getsockname()[:2]
        return LocalAddress(host, port)

    @property
    def error(self) -> DSecError | None:
        """Why the last connection that failed did so; whoever made it saw a reset."""
        return self._error

    async def __aenter__(self) -> LocalAddress:
        if self._eager:
            self._spare = await self._dial()
        try:
            self._server = await asyncio.start_server(
                self._accepted, LOCAL_HOST, self._local, backlog=LOCAL_BACKLOG
            )
        except OSError as exc:
            await self._close()
            text = f"cannot listen on {LOCAL_HOST}:{self._local}: {exc.strerror}"
            raise Conflict(text, field="local") from exc
        return self.address

    async def __aexit__(self, *_exc: object) -> None:
        await self._close()

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving)
        if self._spare is not None:
            await self._spare.close()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            async with await self._dialled() as connection:
                await _join(connection, reader, writer)
            writer.close()
        except DSecError as exc:
            self._failed(exc)
            _reset(writer)
        except OSError:  # of the local end: the sandbox's was reset
            _reset(writer)
        except asyncio.CancelledError:
            _reset(writer)
        finally:
            self._serving.discard(task)

    def _failed(self, error: DSecError) -> None:
        self._error = error
        if self._on_error is not None:
            self._on_error(error)

    async def _dialled(self) -> Connection:
        """A connection: that of the beginning, once, where it is still as it was made."""
        spare, self._spare = self._spare, None
        if spare is not None and not spare._operation.done and not spare._operation.output_ended:
            return spare
        return await self._dial()


async def _join(
    connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Moves bytes both ways until both directions have ended, or one breaks."""

    async def there() -> None:
        while data := await reader.read(READ_BYTES):
            await connection.write(data)
        await connection.close_write()

    async def back() -> None:
        while data := await connection.read():
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    tasks = [asyncio.create_task(there()), asyncio.create_task(back())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes it so that the local end never takes a part for the whole."""
    found: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class HasPorts:
    """What a sandbox offers of its ports."""

    _core: Core

    async def _start(
        self, verb: str, request: Any, reply_type: type[R], *, joining: int | None = None,
        kind: type[Operation[R]] = Operation,
    ) -> Operation[R]:  # fmt: skip
        raise NotImplementedError

    async def _judged(self, error: DSecError) -> DSecError:
        raise NotImplementedError

    async def connect(self, port: int, *, wait: Seconds | None = None) -> Connection:
        """A connection to a TCP port of the sandbox's loopback interface. ``wait``: how
        many seconds to wait for something to listen there. Raises ``PortRefused`` where
        nothing does, ``DeadlineExceeded`` where it takes no connection."""
        wait_s = seconds(wait, "wait") or 0.0
        request = ConnectRequest(op_id=_ids.new(), port=_checked_port(port), wait_s=wait_s)
        operation = await self._start("connect", request, ConnectReply, kind=Dialled)
        assert isinstance(operation, Dialled)
        self._core.dialled.add(operation)
        try:
            await operation.connected()
            if operation.done and (error := (await operation.final()).error):
                raise port_error(error, port)
        except DSecError as exc:
            raise await self._judged(exc) from exc.__cause__
        except BaseException:
            operation.abandon()
            raise
        return Connection(operation, port, self._core)

    def port(
        self,
        port: int,
        *,
        wait: Seconds | None = None,
        local: int = 0,
        on_error: OnError | None = None,
    ) -> Port:
        """``async with sandbox.port(8000) as address``: a loopback address of this
        machine, ``(host, port)``, whose connections reach the sandbox's port. ``wait``:
        how many seconds to wait at the beginning, and for each connection, for something
        to listen there (then ``PortRefused``); without it nothing is tried at the
        beginning. ``local``: the port here, 0 for any. A connection that fails is reset
        here; ``on_error`` is told why."""

        async def dial() -> Connection:
            return await self.connect(port, wait=wait)

        _checked_port(port)
        return Port(dial, port, local=local, eager=wait is not None, on_error=on_error)

    def http(self, port: int, *, wait: Seconds | None = None, **options: Any) -> AsyncClient:
        """An ``httpx`` client whose connections go to the sandbox, with ``options`` of
        its own; relative URLs are of ``http://localhost:<port>``. Other ports of localhost
        are the sandbox's too; other hosts are refused, so no redirect leads to this
        machine's network. ``wait`` as in :meth:`connect`. Raises ``Unsupported`` where
        httpx is not installed (``libdsec[http]``)."""
        _checked_port(port)
        made: AsyncClient = http().async_client(self.connect, port, wait=wait, **options)
        return made


def _checked_port(port: int) -> int:
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 1 << 16:
        raise InvalidRequest(f"a port is a number from 1 to 65535, not {port!r}", field="port")
    return port


def http() -> Any:
    """:mod:`libdsec._http`. Raises ``Unsupported`` without httpx."""
    try:
        from libdsec import _http
    except ImportError as exc:
        raise Unsupported(
            "HTTP needs httpx: pip install 'libdsec[http]'", field="httpx"
        ) from exc
    return _http
