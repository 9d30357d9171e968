"""An operation's place in the trajectory log, and what is kept of its output there.

Owns: numbers without holes, head and tail of an output. Does not own: sending output
(:mod:`operation`), records (:mod:`trail`), whole outputs (:mod:`outputs`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from schemas.exec import WholeOutput
from services.edge.drivers.base import Stream
from services.edge.journal.outputs import Spooled
from shared.trajectory import Record


class Numbers:
    """The numbers of one sandbox's operations, after ``last``."""

    def __init__(self, last: int) -> None:
        self.last = last

    def next(self) -> int:
        """The next operation's."""
        self.last += 1
        return self.last

    def unused(self, number: int) -> None:
        """No operation got it after all; free again where it was the last one."""
        if number == self.last:
            self.last -= 1


class _Ends:
    """The first and the last bytes of one stream, each up to half of ``limit``."""

    def __init__(self, limit: int) -> None:
        self._head_bytes = limit - limit // 2
        self._tail_bytes = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._held = 0  # in the tail
        self.total = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if (room := self._head_bytes - len(self._head)) > 0:
            self._head += data[:room]
            data = data[room:]
        if not data:
            return
        self._tail.append(bytes(data))
        self._held += len(data)
        while self._held - len(self._tail[0]) >= self._tail_bytes:
            self._held -= len(self._tail.popleft())

    def whole(self) -> bytes:
        """What is kept."""
        tail = b"".join(self._tail)
        return bytes(self._head) + tail[max(len(tail) - self._tail_bytes, 0) :]


class Logged:
    """An operation with the number ``seq``; ``record`` where it is logged. Of its output at
    most ``limit`` bytes of each stream are kept, 0 where it is not to be streamed. A longer
    one goes as a whole to what ``spool`` makes for it."""

    def __init__(
        self, seq: int, record: Record | None = None, *, limit: int = 0,
        spool: Callable[[Record, Stream], Spooled] | None = None,
    ) -> None:  # fmt: skip
        self.seq = seq
        self.record = record
        self.whole: list[WholeOutput] = []
        """Of its streams those that are kept as a whole, once it has ended."""
        self._limit = limit
        self._spool = spool
        self._streams: dict[Stream, _Ends] = {}
        self._spooled: dict[Stream, Spooled] = {}

    def add(self, stream: Stream, data: bytes) -> None:
        """Output in order."""
        if self._limit:
            ends = self._streams.get(stream)
            if ends is None:
                ends = self._streams[stream] = _Ends(self._limit)
            if self._spool is not None and ends.total + len(data) > self._limit:
                self._keep(stream, ends, data)
            ends.add(data)

    def _keep(self, stream: Stream, ends: _Ends, data: bytes) -> None:
        spooled = self._spooled.get(stream)
        if spooled is None:
            if self._spool is None or self.record is None:
                return
            spooled = self._spooled[stream] = self._spool(self.record, stream)
            if ends.total:
                spooled.write(ends.whole())
        spooled.write(data)

    def spooled(self) -> list[Spooled]:
        """What is kept as a whole, handed over once."""
        found, self._spooled, self._spool = list(self._spooled.values()), {}, None
        return found

    def kept(self, stream: Stream) -> bytes:
        """What is kept of a stream."""
        ends = self._streams.get(stream)
        return ends.whole() if ends else b""
