"""Operations that have ended a moment ago, for clients that missed the answer.

Owns: how many, how large, how long. The journal keeps results for longer, without the
output that went out in frames. One without frames is kept as its reply alone: thousands
of whole operations are half a million objects, which the collector looks through.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from schemas.base import HEADER_FRAME
from services.edge.door.calls import Call
from services.edge.door.operation import Operation, Send
from shared.clock import Clock
from shared.errors import DsecError

KEPT_S = 120.0
MAX_KEPT = 8_192
MAX_KEPT_BYTES = 64 * 1024 * 1024

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Ended:
    """An operation that has ended and had no frames: answers as it would."""

    call: Call
    hash: bytes
    final: bytes
    send: Send

    @property
    def held_bytes(self) -> int:
        """What is kept of it."""
        return len(self.final)

    async def attach(self, reply_to: str) -> None:
        """Another connection of the same client gets the reply."""
        await self.send(reply_to, self.final, None)

    async def join(self, reply_to: str, _offset: int) -> None:
        """A client that knows nothing but the id gets it: there is no input, and it is over."""
        await self.send(reply_to, b"", {HEADER_FRAME: "k"})
        await self.send(reply_to, self.final, None)

    def received(self, _frame: str, _data: bytes, _offset: int | None = None) -> None:
        """What comes late."""

    def abort(self, error: DsecError) -> None:
        """It is over."""


class Finished:
    """By (uid, operation id), oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: OrderedDict[Key, tuple[float, int, Operation | Ended]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Key) -> Operation | Ended | None:
        """The operation, where it is still kept."""
        entry = self._kept.get(key)
        return entry[2] if entry else None

    def put(self, key: Key, op: Operation) -> None:
        """Keeps it, at the cost of the oldest."""
        self._drop(key)
        kept, size = _alone(op) or op, op.held_bytes
        self._kept[key] = (self._clock.monotonic(), size, kept)
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


def _alone(op: Operation) -> Ended | None:
    """Its reply, where that is all there is of it."""
    streamed = op.streamed
    if op.final is None or streamed["o"] or streamed["e"]:
        return None
    return Ended(op.call, op.hash, op.final, op.publish)
