"""Operations that have ended a moment ago, for clients that missed the answer.

Owns: how many, how large, how long. The journal keeps results for longer, without the
output that went out in frames.
"""

from __future__ import annotations

from collections import OrderedDict

from services.edge.operation import Operation
from shared.clock import Clock

KEPT_S = 120.0
MAX_KEPT = 8_192
MAX_KEPT_BYTES = 64 * 1024 * 1024

Key = tuple[str, str]


class Finished:
    """By (uid, operation id), oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, tuple[float, int, Operation]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Operation | None:
        """The operation, where it is still kept."""
        entry = self._kept.get(key)
        return entry[2] if entry else None

    def put(self, key: Key, op: Operation) -> None:
        """Keeps it, at the cost of the oldest."""
        self._drop(key)
        size = op.held_bytes
        self._kept[key] = (self._clock.monotonic(), size, op)
        self._bytes += size
        while self._kept and (len(self._kept) > MAX_KEPT or self._bytes > MAX_KEPT_BYTES):
            self._drop(next(iter(self._kept)))

    def expire(self) -> None:
        """Drops what is too old."""
        before = self._clock.monotonic() - KEPT_S
        while self._kept:
            key, (at, _, _) = next(iter(self._kept.items()))
            if at > before:
                break
            self._drop(key)

    def _drop(self, key: Key) -> None:
        entry = self._kept.pop(key, None)
        if entry:
            self._bytes -= entry[1]
