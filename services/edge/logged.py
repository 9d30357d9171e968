"""An operation's place in the trajectory log, and what is kept of its output there.

Owns: numbers without holes, head and tail of an output. Does not own: sending output
(:mod:`operation`), records (:mod:`trail`).
"""

from __future__ import annotations

from collections import deque

from services.edge.drivers.base import Stream
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

    def add(self, data: bytes) -> None:
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
    most ``limit`` bytes of each stream are kept, 0 where it is not to be streamed."""

    def __init__(self, seq: int, record: Record | None = None, *, limit: int = 0) -> None:
        self.seq = seq
        self.record = record
        self._limit = limit
        self._streams: dict[str, _Ends] = {}

    def add(self, stream: Stream, data: bytes) -> None:
        """Output in order."""
        if self._limit:
            ends = self._streams.get(stream)
            if ends is None:
                ends = self._streams[stream] = _Ends(self._limit)
            ends.add(data)

    def kept(self, stream: Stream) -> bytes:
        """What is kept of a stream."""
        ends = self._streams.get(stream)
        return ends.whole() if ends else b""
