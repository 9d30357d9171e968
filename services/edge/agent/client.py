"""An asynchronous client of one agent: the connection and its operations.

Owns: the handshake, multiplexing, credit, re-attaching. Does not own: what runs
(:mod:`services.edge.agent.commands`), the agent's life (the driver's). The agent is
inside a sandbox: what it sends is bounded by credit and checked by the decoder.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from services.edge.agent import wire
from services.edge.agent.handshake import CgroupFds, connect_path, error_of, greet, set_up
from services.edge.agent.wire import Fields, Msg, ProtocolError, Tag
from shared.errors import Unavailable

KILL_WAIT_S = 8.0  # a killed tree is reported gone within 5 s by the agent
CONNECT_RETRY_S = 0.005
START_ATTEMPTS = 4
HELD_BYTES_MAX = 2 * wire.WINDOW_BYTES  # of one operation: the credit of both streams
EVENTS_MAX = 4096  # of one operation, however small

NOTES = frozenset({Msg.OK, Msg.EOF})  # of a connection: it is made; its output has ended
OnNote = Callable[[int], Awaitable[None]]
OnOutput = Callable[[int, bytes], Awaitable[None]]
Control = AsyncIterator[tuple[int, bytes]]  # frames for a running operation: type, payload


@dataclass(frozen=True, slots=True)
class Listed:
    """An operation the agent knows; ``taken``: the bytes of input it was given;
    ``terminal``: whether it is on one."""

    id: int
    key: str
    done: bool
    taken: int = 0
    terminal: bool = False


class _Operation:
    """What has arrived for one operation: output until its end, then the end."""

    def __init__(self, op_id: int) -> None:
        self.id = op_id
        self.events: deque[tuple[int, Any]] = deque()
        self.ready = asyncio.Event()
        self.held_bytes = 0
        self.stdin_credit = wire.WINDOW_BYTES
        self.credit_changed = asyncio.Event()
        self.on_note: OnNote | None = None

    def put(self, type_: int, value: Any) -> None:
        if len(self.events) > EVENTS_MAX and type_ != Msg.ERROR:
            raise ProtocolError("more frames than an operation has")
        self.events.append((type_, value))
        self.ready.set()

    def put_data(self, payload: bytes) -> None:
        """Raises :class:`ProtocolError` when the agent sends more than its credit."""
        self.held_bytes += len(payload) - 1
        if self.held_bytes > HELD_BYTES_MAX:
            raise ProtocolError("more output than credit")
        self.put(Msg.DATA, payload)

    async def next(self) -> tuple[int, Any]:
        while not self.events:
            self.ready.clear()
            await self.ready.wait()
        type_, value = self.events.popleft()
        if type_ == Msg.DATA:
            self.held_bytes -= len(value) - 1
        return type_, value


class AgentClient(asyncio.Protocol):
    """One connection. Made by :meth:`connect`; every method may run concurrently."""

    def __init__(self, hello: Fields, decoder: wire.FrameDecoder) -> None:
        self.generation = hello.text(Tag.GENERATION)
        self._next_id = max(1, hello.number(Tag.NEXT_ID, 1))
        self._decoder = decoder
        self._ops: dict[int, _Operation] = {}
        self._transport: asyncio.Transport | None = None
        self._on_lost: Callable[[], None] | None = None
        self.lost = False
        self.leaving = False  # what runs goes on when its follower is cancelled

    @classmethod
    async def connect(
        cls, path: Path, *, generation: str | None = None, cgroups: CgroupFds | None = None,
        deadline_s: float = 5.0, wait: bool = False,
    ) -> AgentClient:  # fmt: skip
        """Connects to the socket at ``path``, checks version and ``generation``, hands
        over ``cgroups``. With ``wait`` an agent that does not listen yet is waited for.
        Raises ``Unavailable`` (nobody answers in time) or ``Unsupported`` (other version
        or generation)."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    try:
                        return await cls._connect(path, generation, cgroups)
                    except (FileNotFoundError, ConnectionRefusedError):
                        if not wait:
                            raise
                        await asyncio.sleep(CONNECT_RETRY_S)
        except (OSError, EOFError, ProtocolError, TimeoutError) as err:
            raise Unavailable(f"the sandbox's agent does not answer: {err!r}") from err

    @classmethod
    async def _connect(
        cls, path: Path, generation: str | None, cgroups: CgroupFds | None
    ) -> AgentClient:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await connect_path(sock, path)
            decoder = wire.FrameDecoder(wire.FROM_AGENT_BYTES_MAX)
            hello = await greet(sock, decoder, generation)
            client = cls(hello, decoder)
            if cgroups is not None:
                await set_up(sock, decoder, cgroups)
            await loop.create_unix_connection(lambda: client, sock=sock)
            return client
        except BaseException:
            sock.close()
            raise

    def on_lost(self, call: Callable[[], None]) -> None:
        """``call`` runs once when the connection ends, unless :meth:`close` ended it."""
        if self.lost:
            call()
        else:
            self._on_lost = call

    def close(self) -> None:
        """Lets go of the agent; what runs in the sandbox goes on."""
        self._on_lost = None
        if self._transport is not None:
            self._transport.abort()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not checked at run time: an event loop may bring transports of its own
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for got in self._decoder.feed(data):
                self._dispatch(got)
        except ProtocolError:
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        error = Unavailable("the connection to the sandbox's agent ended")
        for op in self._ops.values():
            op.put(Msg.ERROR, error)
            op.credit_changed.set()
        if self._on_lost is not None:
            self._on_lost()

    def _dispatch(self, got: wire.Frame) -> None:
        op = self._ops.get(got.op_id)
        if op is None:
            return
        if got.type == Msg.DATA and got.payload:
            op.put_data(got.payload)
        elif got.type == Msg.CREDIT and len(got.payload) == 5:
            op.stdin_credit += int.from_bytes(got.payload[1:], "little")
            op.credit_changed.set()
        elif got.type == Msg.ERROR:
            op.put(Msg.ERROR, error_of(Fields(got.payload)))
        elif got.type in (Msg.RESULT, Msg.OK, Msg.LISTING, Msg.EOF):
            op.put(got.type, got.payload)

    # ---- operations ----

    def _send(self, type_: int, op_id: int, payload: bytes = b"") -> None:
        if self.lost or self._transport is None:
            raise Unavailable("the connection to the sandbox's agent ended")
        self._transport.write(wire.frame(type_, op_id, payload))

    def _open(self) -> _Operation:
        op = _Operation(self._next_id)
        self._next_id = self._next_id + 1 if self._next_id < 0xFFFFFFF0 else 1
        self._ops[op.id] = op
        return op

    async def list(self) -> list[Listed]:
        """Operations that run or wait to be acknowledged."""
        answer = await self._ask(Msg.LIST)
        return [_listed(r) for r in wire.split_records(answer, Tag.OP_ID)]

    async def pause(self) -> None:
        """Stops the commands' clock: no time limit runs out until :meth:`resume`."""
        await self._ask(Msg.PAUSE)

    async def resume(self) -> None:
        """Lets the commands' clock go on."""
        await self._ask(Msg.RESUME)

    async def _ask(self, type_: int) -> bytes:
        """The answer to a request that is one frame."""
        op = self._open()
        try:
            self._send(type_, op.id)
            answer, value = await op.next()
            if answer == Msg.ERROR:
                raise value
            return bytes(value)
        finally:
            self._ops.pop(op.id, None)

    async def run(
        self, type_: int, payload: bytes, on_output: OnOutput,
        *, stdin: AsyncIterator[bytes] | None = None, control: Control | None = None,
        on_note: OnNote | None = None,
    ) -> Fields:  # fmt: skip
        """Starts an operation and follows it to its result. Cancelling kills its tree
        and waits (bounded) until it is dead. Raises the agent's typed error. Frames of
        NOTES go to ``on_note``, in order."""
        op = self._open()
        op.on_note = on_note
        self._send(type_, op.id, payload)
        return await self._follow(op, on_output, stdin, control)

    async def attach(
        self, op_id: int, on_output: OnOutput,
        *, stdin: AsyncIterator[bytes] | None = None, control: Control | None = None,
    ) -> Fields:  # fmt: skip
        """Follows an operation started by an earlier connection: its retained output
        from the beginning, then its result. ``stdin`` goes on after what it has taken."""
        op = self._ops[op_id] = _Operation(op_id)
        op.stdin_credit = 0  # the agent answers with all there is
        self._send(Msg.ATTACH, op_id)
        return await self._follow(op, on_output, stdin, control)

    async def _follow(
        self, op: _Operation, on_output: OnOutput, stdin: AsyncIterator[bytes] | None,
        control: Control | None,
    ) -> Fields:  # fmt: skip
        pumps = []
        if control is not None:  # first: a size comes before what is typed after it
            pumps.append(asyncio.ensure_future(self._pump_control(op, control)))
        if stdin is not None:
            pumps.append(asyncio.ensure_future(self._pump_stdin(op, stdin)))
        try:
            return await self._events(op, on_output, pumps)
        except BaseException:
            await self._kill(op)
            raise
        finally:
            for pump in pumps:
                pump.cancel()
            self._ops.pop(op.id, None)
            if not self.lost and not self.leaving:
                self._send(Msg.ACK, op.id)

    async def _events(
        self, op: _Operation, on_output: OnOutput, pumps: Sequence[asyncio.Future[None]]
    ) -> Fields:
        while True:
            type_, value = await op.next()
            if type_ == Msg.DATA:
                await on_output(value[0], value[1:])
                credit = value[:1] + (len(value) - 1).to_bytes(4, "little")
                if not self.lost:
                    self._send(Msg.CREDIT, op.id, credit)
            elif type_ == Msg.ERROR:
                op.events.clear()
                op.put(type_, value)  # it is over: there is nothing to kill and wait for
                failed = [p for p in pumps if p.done() and not p.cancelled() and p.exception()]
                if failed:
                    failed[0].result()
                raise value
            elif op.on_note is not None and type_ in NOTES:
                await op.on_note(type_)
            else:
                return Fields(value)

    async def _kill(self, op: _Operation) -> None:
        """Ends what still runs and waits for the agent's word that it is gone."""
        if self.lost or self.leaving or any(t != Msg.DATA and t not in NOTES for t, _ in op.events):
            return
        self._send(Msg.KILL, op.id)
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                while True:
                    type_, value = await op.next()
                    if type_ != Msg.DATA:
                        return
                    credit = value[:1] + (len(value) - 1).to_bytes(4, "little")
                    self._send(Msg.CREDIT, op.id, credit)
        except (TimeoutError, Unavailable):
            return

    async def _pump_stdin(self, op: _Operation, chunks: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in chunks:
                for at in range(0, len(chunk), wire.CHUNK_BYTES):
                    piece = chunk[at : at + wire.CHUNK_BYTES]
                    while op.stdin_credit < len(piece):
                        op.credit_changed.clear()
                        await op.credit_changed.wait()
                        if self.lost:
                            return
                    op.stdin_credit -= len(piece)
                    self._send(Msg.DATA, op.id, bytes([wire.STDIN]) + piece)
        except Exception:
            self._send(Msg.KILL, op.id)  # an input that broke off is not an end of input
            raise
        self._send(Msg.EOF, op.id)

    async def _pump_control(self, op: _Operation, frames: Control) -> None:
        async for type_, payload in frames:
            self._send(type_, op.id, payload)


async def started(attempt: Callable[[], Awaitable[Fields]]) -> Fields:
    """The result of ``attempt``, made again where its process was killed from inside the
    sandbox before it took the command: nothing of it had run."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return await attempt()
        except Unavailable as err:
            if err.details.get("errno") != "ECHILD":
                raise
    return await attempt()


def _listed(record: Fields) -> Listed:
    return Listed(
        record.number(Tag.OP_ID), record.text(Tag.KEY), record.text(Tag.STATE) == "done",
        record.number(Tag.TAKEN), bool(record.number(Tag.ROWS)),
    )  # fmt: skip
