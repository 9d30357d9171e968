"""Flow control and order of one operation's stream. Pure.

Owns: which bytes of a frame are new, when a count is due, how much may be sent,
what to send again after a re-attach. Does not own: frames on the wire.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from libdsec._wire import CHUNK_BYTES, WINDOW_BYTES

KEPT_BYTES = 1024 * 1024
"""Acknowledged input that is kept: an edge that was killed had it taken, and not all of it
may have reached the sandbox, whose own window is smaller than this."""
ACK_EVERY_BYTES = WINDOW_BYTES // 4
"""A count is sent when this much was taken since the last one."""
HELD_BYTES_MAX = 2 * WINDOW_BYTES
"""Output that came and was not taken: a window, and what was retained for one who joins."""


COUNT_DIGITS_MAX = 20


def count_of(text: str | None) -> int | None:
    """The number in a header or frame; ``None`` where there is none."""
    if not text or len(text) > COUNT_DIGITS_MAX or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


class Gap(Exception):
    """Bytes are missing before this frame."""


class Flood(Exception):
    """More came than was asked for."""


@dataclass
class Receiving:
    """The output side, in order and once. ``have`` counts the bytes that came, of
    both streams; ``errors`` those of stderr among them; ``taken`` those the caller took."""

    have: int = 0
    taken: int = 0
    acked: int = 0
    missed: int = 0
    begun: bool = True
    errors: int = 0
    ack_every: int = ACK_EVERY_BYTES

    @classmethod
    def at(cls, offset: int) -> Receiving:
        """Begins inside a stream. What the other side no longer has there is skipped, and
        counted in ``missed``, before the first frame."""
        return cls(offset, offset, offset, begun=False)

    @property
    def counts(self) -> str:
        """What came of stdout and of stderr."""
        return f"{self.have - self.errors} {self.errors}"

    def accept(self, data: bytes, offset: int | None, *, error: bool = False) -> bytes:
        """The new bytes of a frame. Raises :class:`Gap` or :class:`Flood`. A frame without
        an offset goes where the output stands."""
        if offset is not None and offset > self.have and not self.begun:
            self.missed = offset - self.have
            self.have = self.taken = self.acked = offset
        self.begun = True
        if offset is not None and offset > self.have:
            raise Gap(f"{self.have} of {offset} bytes")
        new = data if offset is None else data[self.have - offset :]
        self.have += len(new)
        self.errors += len(new) if error else 0
        if self.have - self.taken > HELD_BYTES_MAX:
            raise Flood(f"{self.have - self.taken} bytes over the window")
        return new

    def take(self, count: int) -> int | None:
        """The caller took ``count`` bytes; a total to acknowledge, when one is due."""
        self.taken += count
        if self.taken - self.acked < self.ack_every:
            return None
        self.acked = self.taken
        return self.taken

    def complete(self, total: int | None) -> bool:
        """Whether all came that was sent in frames (as the final reply says)."""
        return total is None or self.have >= total


@dataclass
class Sending:
    """The input side. Chunks are kept until acknowledged, and a little longer: a re-attach
    repeats them."""

    sent: int = 0
    acked: int = 0
    unacked: deque[tuple[int, bytes | memoryview]] = field(default_factory=deque)
    window: int = WINDOW_BYTES

    @property
    def room(self) -> int:
        """Bytes that may be sent now."""
        return self.window - (self.sent - self.acked)

    def push(self, data: bytes | memoryview) -> int:
        """Notes a chunk as sent; its offset. At most CHUNK_BYTES and within room."""
        if len(data) > min(CHUNK_BYTES, self.room):
            raise ValueError(f"a chunk of {len(data)} bytes is over the window")
        offset = self.sent
        self.unacked.append((offset, data))
        self.sent += len(data)
        return offset

    def acknowledge(self, count: int) -> None:
        """The other side has taken ``count`` bytes in all (old counts are ignored)."""
        if not self.acked <= count <= self.sent:
            return
        self.acked = count
        kept = count - KEPT_BYTES
        while self.unacked and self.unacked[0][0] + len(self.unacked[0][1]) <= kept:
            self.unacked.popleft()

    def begin_at(self, count: int) -> bool:
        """After a re-attach the other side has ``count`` bytes, perhaps fewer than it
        acknowledged. Whether the rest can be sent again."""
        if count < self.acked and not (self.unacked and self.unacked[0][0] <= count):
            return False
        self.acked = min(self.acked, count)
        self.acknowledge(count)
        return True

    def again(self) -> list[tuple[int, bytes | memoryview]]:
        """What to repeat from the acknowledged count on: (offset, bytes)."""
        cuts = ((o, c, max(self.acked - o, 0)) for o, c in self.unacked)
        return [(o + cut, c[cut:]) for o, c, cut in cuts if cut < len(c)]


class Stood:
    """How long the sandbox of an operation was paused, as the edge tells it."""

    def __init__(self) -> None:
        self._before_s = self._told_s = 0.0
        self._since: float | None = None

    def told(self, data: bytes, now: float) -> None:
        """A sign of life that came ``now`` (seconds)."""
        seconds, _, paused = data.partition(b" ")
        try:
            told_s = float(seconds or 0)
        except ValueError:
            return
        if told_s < self._told_s:  # an edge that was restarted counts anew
            self._before_s += self._told_s
        self._told_s = told_s
        self._since = now if paused else None

    def seconds(self, now: float) -> float:
        """In all, up to ``now``."""
        going_on_s = 0.0 if self._since is None else now - self._since
        return self._before_s + self._told_s + going_on_s

    @property
    def now(self) -> bool:
        """Whether it is paused, for all that is known."""
        return self._since is not None
