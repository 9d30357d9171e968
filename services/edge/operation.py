"""One operation at the door: its frames in both directions and their flow control.

Owns: order, windows, keepalives, what a client that comes back is sent again. Does
not own: what the operation does (verbs), whether it may (door).

Output that the client has not confirmed is kept, at most ``WINDOW_BYTES``: so a client
whose connection broke attaches again with the same operation id and is sent it again.
Every output frame says at which offset it begins (header ``Dsec-Offset``), the final one
how much there was: a frame lost on the way is noticed.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from schemas.base import HEADER_FRAME
from schemas.exec import CHUNK_BYTES, HEADER_OFFSET, WINDOW_BYTES
from services.edge.calls import Call
from services.edge.drivers.base import Stream
from shared.clock import Clock
from shared.errors import DeadlineExceeded, DsecError, InvalidRequest

STALL_S = 300.0
"""Longest wait for a client that confirms no output."""
ACK_EVERY_BYTES = WINDOW_BYTES // 4
MAX_CONTROL = 64
FRAME_OF: dict[str, str] = {"stdout": "o", "stderr": "e"}
SIGNALS = frozenset(
    {
        "0", "HUP", "INT", "QUIT", "KILL", "USR1", "USR2", "TERM", "CONT", "STOP", "TSTP",
        "TTIN", "TTOU", "WINCH", "PIPE", "ALRM",
    }
)  # fmt: skip

Send = Callable[[str, bytes, dict[str, str]], Awaitable[None]]


class Operation:
    """The edge's side of one operation; the drivers' :class:`ExecIO`."""

    def __init__(
        self, call: Call, op_id: str, *, hash_: bytes, reply_to: str, send: Send, clock: Clock
    ) -> None:
        self.call, self.op_id, self.hash = call, op_id, hash_
        self.reply_to = reply_to
        self.begun_at = clock.now()
        self.streaming = True
        self.task: asyncio.Task[None] | None = None
        self.aborted: DsecError | None = None
        self.cancelled = False
        self.begun = False
        self.claimed = False  # its intent is in the journal
        self.final: bytes | None = None
        self.kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self.taken = 0
        self._clock = clock
        self._publish = send
        self._sending = asyncio.Lock()
        self._sent_at = clock.monotonic()
        self._sent = self._confirmed = 0
        self.streamed: dict[str, int] = {"o": 0, "e": 0}
        self._unconfirmed: deque[tuple[int, str, bytes]] = deque()  # (offset, frame, data)
        self._room = asyncio.Event()
        self._input: deque[bytes] = deque()
        self._queued = 0
        self._eof = False
        self._hole = False
        self._wants_input = False
        self._told_taken = 0
        self._arrived = asyncio.Event()
        self._control: asyncio.Queue[str] = asyncio.Queue(MAX_CONTROL)

    # -- out ----------------------------------------------------------------------

    async def output(self, stream: Stream, data: bytes) -> None:
        """Output in order: in frames, waiting for a slow client, or kept for the final
        reply."""
        if not self.streaming:
            self.kept[stream] += data
            return
        for start in range(0, len(data), CHUNK_BYTES):
            await self._frame(FRAME_OF[stream], bytes(data[start : start + CHUNK_BYTES]))

    async def _frame(self, frame: str, data: bytes) -> None:
        while self._sent - self._confirmed + len(data) > WINDOW_BYTES:
            self._room.clear()
            try:
                async with asyncio.timeout(STALL_S):
                    await self._room.wait()
            except TimeoutError:
                raise DeadlineExceeded(f"the reader took nothing for {STALL_S:g} s") from None
        async with self._sending:
            offset = self._sent
            self._unconfirmed.append((offset, frame, data))
            self._sent += len(data)
            self.streamed[frame] += len(data)
            await self._send(frame, data, {HEADER_OFFSET: str(offset)})

    async def finish(self, final: bytes) -> None:
        """The final reply; nothing comes after it."""
        async with self._sending:
            self.final = final
            await self._send("x", final, {HEADER_OFFSET: str(self._sent)})

    async def attach(self, reply_to: str) -> None:
        """Answers go to another connection of the same client from here on."""
        async with self._sending:
            self.reply_to = reply_to
            for offset, frame, data in self._unconfirmed:
                await self._send(frame, data, {HEADER_OFFSET: str(offset)})
            if self.final is not None:
                await self._send("x", self.final, {HEADER_OFFSET: str(self._sent)})
                return
            if self._wants_input:
                self._input.clear()  # the client sends again what was not taken
                self._queued, self._eof, self._hole = 0, False, False
                await self._send("r", b"")
                await self._send("a", str(self.taken).encode())
            elif not self._unconfirmed:
                await self._send("k", b"")

    async def keep_alive(self, silent_s: float) -> None:
        """A sign of life, where nothing was sent for ``silent_s``."""
        if self._hole or self.final is not None:
            return
        if self._clock.monotonic() - self._sent_at >= silent_s:
            await self._send("k", b"")

    async def _send(self, frame: str, data: bytes, more: dict[str, str] | None = None) -> None:
        self._sent_at = self._clock.monotonic()
        await self._publish(self.reply_to, data, {HEADER_FRAME: frame, **(more or {})})

    @property
    def held_bytes(self) -> int:
        """Output kept for a client that may come back."""
        return self._sent - self._confirmed + len(self.final or b"")

    # -- in -----------------------------------------------------------------------

    def received(self, frame: str, data: bytes, offset: int | None = None) -> None:
        """A frame from the client; ``offset`` says where input belongs. Raises
        ``InvalidRequest`` for one that breaks the rules."""
        if frame in ("i", "f"):
            self._input_frame(data, offset, end=frame == "f")
        elif frame == "w":
            self._confirm(_count(data))
        elif frame == "s":
            self._signal(data.decode("ascii", "replace").upper().removeprefix("SIG"))
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
        if len(data) > CHUNK_BYTES or self._queued + len(data) > WINDOW_BYTES:
            raise InvalidRequest(
                f"more than {WINDOW_BYTES} bytes of input not taken yet", field="stdin"
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
            self._unconfirmed.popleft()
        self._room.set()

    def _signal(self, name: str) -> None:
        if name not in SIGNALS:
            raise InvalidRequest(f"signal {name[:20]!r} is unknown", field="signal")
        if self._control.full():
            raise InvalidRequest("too many signals wait", field="signal")
        self._control.put_nowait(name)

    def preset(self, data: bytes) -> None:
        """All input there will be."""
        if data:
            self._input.append(data)
            self._queued = len(data)
        self._eof = True

    async def want_input(self) -> None:
        """Tells the client to send input."""
        self._wants_input = True
        await self._send("r", b"")

    async def input(self) -> AsyncIterator[bytes]:
        """Chunks of input until its end."""
        while True:
            while self._input:
                data = self._input.popleft()
                self._queued -= len(data)
                self.taken += len(data)
                yield data
                if self._wants_input and (
                    not self._input or self.taken - self._told_taken >= ACK_EVERY_BYTES
                ):
                    self._told_taken = self.taken
                    await self._send("a", str(self.taken).encode())
            if self._eof:
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def control(self) -> AsyncIterator[str]:
        """Signals for the command."""
        while True:
            yield await self._control.get()

    # -- its end ------------------------------------------------------------------

    def cancel(self) -> None:
        """The client gives it up."""
        self.cancelled = True
        if self.task:
            self.task.cancel()

    def abort(self, error: DsecError) -> None:
        """It can't go on: the final reply will be ``error``."""
        self.aborted = self.aborted or error
        if self.task:
            self.task.cancel()


def _count(data: bytes) -> int:
    try:
        return int(data)
    except ValueError:
        raise InvalidRequest("a count is a decimal number", field="count") from None
