"""An asynchronous client of one agent: the connection and its operations.

Owns: multiplexing, credit, re-attaching. Does not own: how a connection begins
(:mod:`services.edge.agent.handshake`), what runs (:mod:`services.edge.agent.commands`),
the agent's life (the driver's). The agent is inside a sandbox and may be hostile: what it
sends is bounded by credit, what waits for it by flow control, and a frame that breaks the
rules ends the connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from services.edge.agent import handshake, wire
from services.edge.agent.arriving import NOTES, Arriving, OnNote, data_of
from services.edge.agent.handshake import CgroupFds
from services.edge.agent.listing import Listed, listed
from services.edge.agent.wire import Fields, Msg, ProtocolError, Tag
from shared.errors import DsecError, Unavailable

KILL_WAIT_S = 8.0  # a killed tree is reported gone within 5 s by the agent
CONNECT_RETRY_S = 0.005
READ_BYTES = 512 * 1024
START_ATTEMPTS = 4
ANSWER_S = 10.0  # the agent's answer to a request that is one frame
OP_ID_MAX = 0xFFFFFFF0
CREDIT_BYTES = wire.WINDOW_BYTES // 4  # consumed before the agent is told
ACK_LATER_S = 0.2  # acknowledgements wait this long, longer than the journal takes
ACK_LATER_MAX = 48  # of them wait; the agent keeps 64 results
ACK_LATER_BYTES = 64 * 1024  # an operation with more output is acknowledged at once
OnOutput = Callable[[int, bytes], Awaitable[None]]
Control = Callable[[Callable[[int, bytes], None]], None]
"""Is given, once, what sends a frame (type, payload) to the running operation."""


class AgentClient(asyncio.BufferedProtocol):
    """One connection. Made by :meth:`connect`; every method may run concurrently."""

    _incoming = memoryview(bytearray(READ_BYTES))
    """Of all connections: what is in it is taken out before the loop reads again."""

    def __init__(self, hello: Fields, decoder: wire.FrameDecoder) -> None:
        self.generation = hello.text(Tag.GENERATION)
        self._next_id = _usable_id(hello.number(Tag.NEXT_ID, 1))
        self._decoder = decoder
        self._ops: dict[int, Arriving] = {}
        self._transport: asyncio.Transport | None = None
        self._on_lost: Callable[[], None] | None = None
        self._room = asyncio.Event()  # to write: an agent that does not read makes us wait
        self._room.set()
        self._acks: list[bytes] = []
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
            await handshake.connect(sock, path)
            decoder = wire.FrameDecoder(wire.FROM_AGENT_BYTES_MAX)
            hello = await handshake.greet(sock, decoder, generation)
            client = cls(hello, decoder)
            if cgroups is not None:
                await handshake.set_up(sock, decoder, cgroups, path)
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

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for got in self._decoder.feed(self._incoming[:nbytes]):
                self._dispatch(got)
        except ProtocolError:
            if self._transport is not None:
                self._transport.abort()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._room.set()
        error = Unavailable("the connection to the sandbox's agent ended")
        for op in self._ops.values():
            op.put(Msg.ERROR, error)
            op.look_at_credit()
        if self._on_lost is not None:
            self._on_lost()

    def _dispatch(self, got: wire.Frame) -> None:
        op = self._ops.get(got.op_id)
        if op is None:
            return
        if got.type == Msg.RESULT:
            op.put_end(Msg.RESULT, Fields(got.payload))
        elif got.type == Msg.DATA and got.payload:
            op.put_data(got.payload)
        elif got.type == Msg.CREDIT and len(got.payload) == 5:
            op.add_credit(got.payload)
        elif got.type == Msg.ERROR:
            op.put_end(Msg.ERROR, handshake.error_of(Fields(got.payload)))
        elif got.type == Msg.LISTING:
            records = wire.split_records(got.payload, Tag.OP_ID)
            op.put_end(Msg.LISTING, [listed(r) for r in records])
        elif got.type in NOTES:
            op.put_note(got.type)
        else:
            raise ProtocolError(f"a frame of type {got.type}")

    # ---- operations ----

    def _send(self, type_: int, op_id: int, payload: bytes = b"") -> None:
        if self.lost or self._transport is None:
            raise Unavailable("the connection to the sandbox's agent ended")
        self._transport.write(wire.frame(type_, op_id, payload))

    async def _send_in_turn(self, type_: int, op_id: int, payload: bytes = b"") -> None:
        """As :meth:`_send`, once there is room."""
        if not self._room.is_set():
            await self._room.wait()
        self._send(type_, op_id, payload)

    async def _until_room(self) -> None:
        if not self._room.is_set():  # an agent that does not read is waited for
            await self._room.wait()

    def _broken(self, what: str) -> DsecError:
        """Ends the connection of an agent that breaks the protocol."""
        if self._transport is not None:
            self._transport.abort()
        return Unavailable(f"the sandbox's agent broke the protocol: {what}")

    async def _send_data(self, op: Arriving, piece: memoryview) -> None:
        await self._until_room()
        if self.lost or self._transport is None:
            raise Unavailable("the connection to the sandbox's agent ended")
        self._transport.writelines((wire.data_frame(op.id, wire.STDIN, len(piece)), piece))

    def _ack(self, op: Arriving) -> None:
        """The agent may forget the operation. It is told of several at once: it would wake
        up for nothing else, once a command. And until then an edge that dies before the
        result is in its journal finds it with the agent."""
        self._acks.append(wire.frame(Msg.ACK, op.id))
        if op.output_bytes > ACK_LATER_BYTES or len(self._acks) >= ACK_LATER_MAX:
            self._send_acks()
        elif len(self._acks) == 1:
            asyncio.get_running_loop().call_later(ACK_LATER_S, self._send_acks)

    def _send_acks(self) -> None:
        acks, self._acks = self._acks, []
        if acks and self._transport is not None and not self.lost and not self.leaving:
            self._transport.write(b"".join(acks))

    def _open(self) -> Arriving:
        op = Arriving(self._next_id)
        self._next_id = _usable_id(self._next_id + 1)
        self._ops[op.id] = op
        return op

    async def list(self) -> list[Listed]:
        """Operations that run or wait to be acknowledged."""
        return cast("list[Listed]", await self._ask(Msg.LIST))

    async def pause(self) -> None:
        """Stops the commands' clock: no time limit runs out until :meth:`resume`."""
        await self._ask(Msg.PAUSE)

    async def resume(self) -> None:
        """Lets the commands' clock go on."""
        await self._ask(Msg.RESUME)

    async def policy(self, payload: bytes, ask: socket.socket | None) -> None:
        """What commands to come give up; ``ask`` is where their filters' listeners go."""
        await self._ask(Msg.POLICY, payload, [ask.fileno()] if ask else [])

    async def _ask(self, type_: int, payload: bytes = b"", fds: Sequence[int] = ()) -> Any:
        """The answer to a request that is one frame."""
        op = self._open()
        op.on_note = _unheard  # OK is an answer here
        try:
            async with asyncio.timeout(ANSWER_S):
                if fds and self._transport is not None and not self.lost:
                    frame = wire.frame(type_, op.id, payload)
                    await handshake.send_along(self._transport, frame, fds)
                else:
                    await self._send_in_turn(type_, op.id, payload)
                answer, value = await op.next()
            if answer == Msg.ERROR:
                raise value
            if answer != (Msg.LISTING if type_ == Msg.LIST else Msg.OK):
                raise self._broken(f"no answer to {Msg(type_).name}")
            return value
        except TimeoutError:
            raise Unavailable("the sandbox's agent does not answer") from None
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
        try:
            await self._send_in_turn(type_, op.id, payload)
        except BaseException:
            self._ops.pop(op.id, None)
            raise
        return await self._follow(op, on_output, stdin, control)

    async def attach(
        self, op_id: int, on_output: OnOutput,
        *, stdin: AsyncIterator[bytes] | None = None, control: Control | None = None,
    ) -> Fields:  # fmt: skip
        """Follows an operation started by an earlier connection: its retained output
        from the beginning, then its result. ``stdin`` goes on after what it has taken."""
        op = self._ops[op_id] = Arriving(op_id)
        op.stdin_credit = 0  # the agent answers with all there is
        await self._send_in_turn(Msg.ATTACH, op_id)
        return await self._follow(op, on_output, stdin, control)

    async def _follow(
        self, op: Arriving, on_output: OnOutput, stdin: AsyncIterator[bytes] | None,
        control: Control | None,
    ) -> Fields:  # fmt: skip
        if control is not None:  # first: a size comes before what is typed after it
            control(lambda type_, payload: self._send_to(op, type_, payload))
        pump = None if stdin is None else asyncio.ensure_future(self._pump_stdin(op, stdin))
        try:
            return await self._events(op, on_output, pump)
        except BaseException:
            await self._kill(op)
            raise
        finally:
            if pump is not None:
                pump.cancel()
            self._ops.pop(op.id, None)
            if not self.lost and not self.leaving:
                self._ack(op)

    async def _events(
        self, op: Arriving, on_output: OnOutput, pump: asyncio.Future[None] | None
    ) -> Fields:
        while True:
            type_, value = await op.next()
            if type_ == Msg.DATA:
                await on_output(value[0], data_of(value))
                await self._consumed(op, value)
            elif type_ == Msg.ERROR:
                op.events.clear()
                op.put(type_, value)  # it is over: there is nothing to kill and wait for
                if pump and pump.done() and not pump.cancelled() and pump.exception():
                    pump.result()
                raise value
            elif type_ == Msg.RESULT:
                return cast(Fields, value)
            elif op.on_note is not None and type_ in NOTES:
                await op.on_note(type_)
            else:
                raise self._broken("no result of an operation")

    async def _consumed(self, op: Arriving, data: bytes) -> None:
        """Grants credit for a DATA payload, and for those before it that were too small
        to be worth a frame."""
        stream, op.output_bytes = data[0], op.output_bytes + len(data) - 1
        consumed = op.consumed.get(stream, 0) + len(data) - 1
        if consumed >= CREDIT_BYTES:
            await self._until_room()
            self._send_to(op, Msg.CREDIT, bytes(data[:1]) + consumed.to_bytes(4, "little"))
            consumed = 0
        op.consumed[stream] = consumed

    def _send_to(self, op: Arriving, type_: int, payload: bytes) -> None:
        """A frame that is for nobody once the operation or the connection is over."""
        if op.id in self._ops and not self.lost:
            self._send(type_, op.id, payload)

    async def _kill(self, op: Arriving) -> None:
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
                    await self._consumed(op, value)
        except (TimeoutError, Unavailable):
            return

    async def _pump_stdin(self, op: Arriving, chunks: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in chunks:
                view = memoryview(chunk)
                for at in range(0, len(view), wire.CHUNK_BYTES):
                    piece = view[at : at + wire.CHUNK_BYTES]
                    while op.stdin_credit < len(piece):
                        await op.credit()
                        if self.lost:
                            return
                    op.stdin_credit -= len(piece)
                    await self._send_data(op, piece)
        except Exception:
            self._send(Msg.KILL, op.id)  # an input that broke off is not an end of input
            raise
        self._send(Msg.EOF, op.id)


async def started(
    attempt: Callable[[], Awaitable[Fields]], possible: Callable[[], bool] = lambda: True
) -> Fields:
    """The result of ``attempt``, made again while that is ``possible`` where its process
    was killed from inside the sandbox before it began: nothing of it had run."""
    for _ in range(START_ATTEMPTS - 1):
        try:
            return await attempt()
        except Unavailable as err:
            if err.details.get("errno") != "ECHILD" or not possible():
                raise
    return await attempt()


async def _unheard(_type: int) -> None:
    return None


def _usable_id(number: int) -> int:
    return number if 0 < number <= OP_ID_MAX else 1
