"""One operation at the door: its frames in both directions and their flow control.

Owns: order, windows, keepalives, what a client that comes back is sent again. Does
not own: what the operation does (verbs), whether it may (door).

Output that the client has not confirmed is kept, at most ``WINDOW_BYTES``: so a client
whose connection broke attaches again with the same operation id and is sent it again.
Every output frame says at which offset it begins (header ``Dsec-Offset``), the final one
how much there was: a frame lost on the way is noticed. Some of what was confirmed is
kept too, for another client that joins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from schemas.base import HEADER_FRAME, encode
from schemas.exec import (
    CHUNK_BYTES,
    HANGUP_S,
    HEADER_OFFSET,
    HEADER_SOURCE,
    INLINE_BYTES,
    LATE_BYTES,
    WINDOW_BYTES,
    ExecReply,
)  # fmt: skip
from services.edge.door.calls import Call
from services.edge.door.orders import Orders, count_of, signal_of, size_of
from services.edge.drivers.base import Resize, Stream
from services.edge.journal.logged import Logged
from services.edge.sandbox.runclock import RunClock
from shared.clock import Clock
from shared.errors import Conflict, DeadlineExceeded, DsecError, Internal, InvalidRequest
from shared.wire import to_wire

STALL_S = 300.0
"""Longest wait for a client that confirms no output."""
RETAINED_BYTES = 1024 * 1024
"""Confirmed output that is kept for a client that joins."""
FRAME_OF: dict[str, str] = {"stdout": "o", "stderr": "e"}

Frame = tuple[int, str, bytes]
"""Offset, kind and content of a frame of output."""
Send = Callable[[str, bytes, dict[str, str] | None], Awaitable[None]]


class Operation:
    """The edge's side of one operation; the drivers' :class:`ExecIO`."""

    window_bytes = WINDOW_BYTES
    retained_max_bytes = RETAINED_BYTES
    may_stall = False  # a client that confirms nothing is waited for

    # as they are when it begins: most operations change few of them
    terminal = False  # a silent client has hung up
    streaming = True
    late = False  # output is in no hurry while there is little of it
    task: asyncio.Task[None] | None = None
    aborted: DsecError | None = None
    cancelled = begun = False
    claimed = False  # its intent is in the journal
    resumed = False  # it was begun by an earlier edge process
    stays = False  # its command may outlive this process
    left = False  # and does
    takes_input = False
    repeats = False  # to do it once more does no harm
    repeated = False  # its client asked for it before
    again = False  # and got something of it, but no end
    source: str | None = None  # what the output is read from, in which state
    have = (0, 0)  # bytes of both streams that the client says it has
    final: bytes | None = None
    taken = _sent = _confirmed = _retained_bytes = _queued = _told_taken = 0
    _eof = _hole = _moved = _entered = _wants_input = False
    _whole: bytes | None = None  # all input, where it came with the request
    _run: RunClock | None = None
    _stood_before_s, _told_runs = 0.0, True

    def __init__(
        self, call: Call, op_id: str, *, hash_: bytes, reply_to: str, send: Send, clock: Clock
    ) -> None:
        self.call, self.op_id, self.hash = call, op_id, hash_
        self.reply_to = reply_to
        self.begun_at = clock.now()
        self.logged = Logged(0)  # its place in the trajectory log
        self.kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._clock = clock
        self.publish = send
        self._sending = asyncio.Lock()
        self._sent_at = self._heard_at = clock.monotonic()
        self.streamed: dict[str, int] = {"o": 0, "e": 0}
        self._unconfirmed: deque[Frame] = deque()
        self._retained: deque[Frame] = deque()
        self._skip: dict[str, int] = {"stdout": 0, "stderr": 0}
        self._room = asyncio.Event()
        self._input: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self.orders = Orders()

    # -- out ----------------------------------------------------------------------

    async def output(self, stream: Stream, data: bytes) -> None:
        """Output in order: in frames, waiting for a slow client, or kept for the final
        reply."""
        if self.streaming:
            self.logged.add(stream, data)
        if self.late and sum(map(len, self.kept.values())) + len(data) > LATE_BYTES:
            await self._release()
        if self.late or not self.streaming:
            if len(self.kept[stream]) + len(data) > INLINE_BYTES:  # what it was told to keep to
                raise Internal(f"the sandbox sent more than {INLINE_BYTES} bytes", cause="runtime")
            self.kept[stream] += data
            return
        if skip := min(self._skip[stream], len(data)):
            self._skip[stream] -= skip
            data = data[skip:]
        for start in range(0, len(data), CHUNK_BYTES):  # bytes of bytes are no copy
            await self._frame(FRAME_OF[stream], bytes(data[start : start + CHUNK_BYTES]))

    async def _release(self) -> None:
        """What was kept for the final reply goes out in frames after all, and the rest
        as it comes."""
        self.late = False
        held = [(stream, bytes(data)) for stream, data in self.kept.items() if data]
        for stream, data in held:
            self.kept[stream].clear()
            await self._frame(FRAME_OF[stream], data)

    async def _frame(self, frame: str, data: bytes) -> None:
        while self._sent - self._confirmed + len(data) > self.window_bytes:
            self._room.clear()
            try:
                async with asyncio.timeout(None if self.may_stall else STALL_S):
                    await self._room.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"the reader took nothing for {STALL_S:g} s") from None
        async with self._sending:
            offset = self._sent
            self._unconfirmed.append((offset, frame, data))
            self._sent += len(data)
            self.streamed[frame] += len(data)
            await self._send(frame, data, self._facts(offset))

    def _facts(self, offset: int) -> dict[str, str]:
        """The headers of a frame of output."""
        facts = {HEADER_OFFSET: str(offset)}
        if self.source is not None:
            facts[HEADER_SOURCE] = self.source
        return facts

    async def finish(self, final: bytes) -> None:
        """The final reply; nothing comes after it."""
        async with self._sending:
            self.final = final
            await self._send_final(final)

    async def _send_final(self, final: bytes) -> None:
        """Without headers, which cost more than a small reply, where no frames came before."""
        facts = {HEADER_FRAME: "x", HEADER_OFFSET: str(self._sent)} if self._sent else None
        await self.publish(self.reply_to, final, facts)

    def asked_again(self, have: tuple[int, int]) -> None:
        """It begins for a client that asks again: ``have`` are the bytes of both streams
        that it has."""
        self.have, self.again = have, True

    async def attach(self, reply_to: str) -> None:
        """Answers go to another connection of the same client from here on."""
        async with self._sending:
            self._heard_at = self._clock.monotonic()
            await self._move(reply_to)
            for offset, frame, data in self._unconfirmed:
                await self._send(frame, data, self._facts(offset))
            if self.final is not None:
                await self._send_final(self.final)
                return
            if self._wants_input:
                self._input.clear()  # the client sends again what was not taken
                self._queued, self._eof, self._hole = 0, False, False
                await self._send("r", b"")
                await self._send("a", str(self.taken).encode())
            elif not self._unconfirmed:
                await self._send("k", b"")

    async def join(self, reply_to: str, offset: int) -> None:
        """Answers go to a client that knows nothing but the operation's id: whether it
        takes input and from which count on, then retained output from ``offset`` on."""
        if self.late:
            await self._release()
        async with self._sending:
            self._heard_at = self._clock.monotonic()
            self._moved, self._hole = True, False
            await self._move(reply_to)
            if self.final is None and self.takes_input and not self._eof:
                await self._send("r", b"")
                await self._send("a", str(self.taken + self._queued).encode())
            else:
                await self._send("k", b"")
            for at, frame, data in (*self._retained, *self._unconfirmed):
                if at + len(data) > offset:
                    await self._send(frame, data, {HEADER_OFFSET: str(at)})
            if self.final is not None:
                await self._send_final(self.final)
        self._confirm(offset)

    def goes_on(self, base: tuple[int, int] = (0, 0)) -> None:
        """Its output begins after what the client has from an earlier edge process, or
        after ``base``: what came before it is gone."""
        begins = [max(pair) for pair in zip(self.have, base, strict=True)]
        self._sent = self._confirmed = sum(begins)
        self.streamed = {"o": begins[0], "e": begins[1]}

    async def resumes(
        self, *, taken: int, terminal: bool, base: tuple[int, int] = (0, 0)
    ) -> None:
        """Its command comes from an earlier edge process. Output goes on after what the
        client has (all of it comes again, of a terminal only what is new), input after
        the ``taken`` bytes. What came before ``base`` is gone."""
        self.goes_on(base)
        begins = self.streamed["o"], self.streamed["e"]
        self.terminal = self.terminal or terminal
        if self.streaming and not terminal:
            self._skip = {"stdout": begins[0] - base[0], "stderr": begins[1] - base[1]}
        if not self.takes_input:
            return
        if self._whole is not None:
            self._input.clear()
            self.preset(self._whole[taken:])
            return
        self.taken = self._told_taken = taken
        self._wants_input = True
        await self._send("r", b"")
        await self._send("a", str(taken).encode())

    async def _move(self, reply_to: str) -> None:
        """Once a client has joined, the one that loses the operation is told so. Where
        it is the same client, nobody listens on its old subject any more."""
        old, self.reply_to = self.reply_to, reply_to
        if self._moved and self.final is None:
            error = to_wire(Conflict("another client attached to this operation", field="op_id"))
            final = encode(ExecReply(op_id=self.op_id, error=error))
            await self.publish(old, final, {HEADER_FRAME: "x"})

    async def keep_alive(self, silent_s: float, *, deaf: bool = False) -> None:
        """A sign of life, where nothing was sent for ``silent_s``. A client at a terminal
        gives one back, or has hung up. ``deaf``: nobody could be heard of late."""
        if self.final is not None:
            return
        now = self._clock.monotonic()
        self._heard_at = now if deaf else self._heard_at
        unheard_s = now - self._heard_at if self.terminal else 0.0
        if self._run is not None and self._run.runs != self._told_runs:
            silent_s = 0.0  # news: the client's clocks stop and go with the sandbox
        if unheard_s >= HANGUP_S:
            self.cancel()
        elif not self._hole and (now - self._sent_at >= silent_s or unheard_s >= silent_s):
            await self._send("k", self._standing())

    def runs_by(self, clock: RunClock) -> None:
        """Which clock stands still when its sandbox does."""
        self._run, self._stood_before_s = clock, clock.stood_s()

    def _standing(self) -> bytes:
        if self._run is None:
            return b""
        self._told_runs = self._run.runs
        stood = f"{self._run.stood_s() - self._stood_before_s:.3f}".encode()
        return stood if self._told_runs else stood + b" p"

    async def _send(self, frame: str, data: bytes, more: dict[str, str] | None = None) -> None:
        self._sent_at = self._clock.monotonic()
        await self.publish(self.reply_to, data, {HEADER_FRAME: frame, **(more or {})})

    @property
    def held_bytes(self) -> int:
        """Output kept for a client that may come back."""
        return self._sent - self._confirmed + self._retained_bytes + len(self.final or b"")

    # -- in -----------------------------------------------------------------------

    def received(self, frame: str, data: bytes, offset: int | None = None) -> None:
        """A frame from the client; ``offset`` says where input belongs. Raises
        ``InvalidRequest`` for one that breaks the rules."""
        self._heard_at = self._clock.monotonic()
        if frame in ("i", "f"):
            self._input_frame(data, offset, end=frame == "f")
        elif frame == "w":
            self._confirm(count_of(data))
        elif frame == "s":
            self.orders.put(signal_of(data))
        elif frame == "z":
            self.orders.put(size_of(data))
        elif frame == "c":
            self.cancel()
        else:
            raise InvalidRequest(f"frame {frame[:20]!r} is unknown", field=HEADER_FRAME)

    def _input_frame(self, data: bytes, offset: int | None, *, end: bool) -> None:
        have = self.taken + self._queued
        if offset is not None and offset > have:
            # frames were lost with a connection. This end keeps silent from here on:
            # after a while the client attaches again and sends on from what was taken
            self._hole = True
        if self._hole:
            return
        if offset is not None:
            data = data[have - offset :]  # what came before came twice
        if data and self._eof:
            raise InvalidRequest("input after its end", field="stdin")
        if len(data) > CHUNK_BYTES or self._queued + len(data) > self.window_bytes:
            raise InvalidRequest(
                f"more than {self.window_bytes} bytes of input not taken yet", field="stdin"
            )
        if data:
            self._queued += len(data)
            self._input.append(data)
        self._eof = self._eof or end
        self._arrived.set()

    def _confirm(self, count: int) -> None:
        self._confirmed = max(self._confirmed, min(count, self._sent))
        while self._unconfirmed:
            offset, _, data = self._unconfirmed[0]
            if offset + len(data) > self._confirmed:
                break
            self._retain(self._unconfirmed.popleft())
        self._room.set()

    def _retain(self, frame: Frame) -> None:
        self._retained.append(frame)
        self._retained_bytes += len(frame[2])
        while self._retained_bytes > self.retained_max_bytes:
            self._retained_bytes -= len(self._retained.popleft()[2])

    def preset(self, data: bytes) -> None:
        """All input there will be."""
        self._whole = data
        if data:
            self._input.append(data)
            self._queued = len(data)
        self._eof = True

    async def want_input(self) -> None:
        """Tells the client to send input."""
        self._wants_input = self.takes_input = True
        await self._send("r", b"")
        if self.again:
            await self._send("a", b"0")

    async def input(self) -> AsyncIterator[bytes]:
        """Chunks of input until its end."""
        while True:
            while self._input:
                data = self._input.popleft()
                self._queued -= len(data)
                self.taken += len(data)
                yield data
                if self._wants_input and (
                    not self._input or self.taken - self._told_taken >= self.window_bytes // 4
                ):
                    self._told_taken = self.taken
                    await self._send("a", str(self.taken).encode())
            if self._eof:
                return
            self._arrived.clear()
            await self._arrived.wait()

    def control_to(self, take: Callable[[str | Resize], None]) -> None:
        """Gives signals for the command and sizes of its terminal to ``take``."""
        self.orders.give_to(take)

    # -- its end ------------------------------------------------------------------

    def enter(self) -> None:
        """Its task runs. One that is cancelled before would never do its work's end."""
        self._entered = True
        if self.cancelled or self.left or self.aborted is not None:
            raise asyncio.CancelledError

    def cancel(self) -> None:
        """The client gives it up."""
        self.cancelled = True
        self._interrupt()

    def leave(self) -> None:
        """This process ends, its command goes on."""
        self.left = True
        self._interrupt()

    def abort(self, error: DsecError) -> None:
        """It can't go on: the final reply will be ``error``."""
        self.aborted = self.aborted or error
        self._interrupt()

    def _interrupt(self) -> None:
        if self.task and self._entered:
            self.task.cancel()
