"""What went wrong with layers, for the edge to tell. Owns: a bounded list of it."""

from __future__ import annotations

import time
from collections import deque
from typing import Literal

import msgspec

KEPT = 1000
SAME_S = 10.0
"""The same fault again so soon is counted, not listed again."""

Kind = Literal["damaged", "missing", "unavailable", "deadline"]


class Fault(msgspec.Struct):
    """``chunk`` is -1 for a layer's metadata. ``at``: unix time."""

    number: int
    at: float
    kind: Kind
    digest: str
    chunk: int
    message: str
    count: int = 1


class Faults:
    """The latest faults. Numbers begin with the time in milliseconds, so that those of a
    later process are higher."""

    def __init__(self) -> None:
        self._kept: deque[Fault] = deque(maxlen=KEPT)
        self._number = time.time_ns() // 1_000_000

    def tell(self, kind: Kind, digest: str, chunk: int, message: str) -> None:
        now = time.time()
        for fault in reversed(self._kept):
            if now - fault.at > SAME_S:
                break
            if (fault.kind, fault.digest, fault.chunk) == (kind, digest, chunk):
                fault.count += 1
                return
        self._number += 1
        self._kept.append(Fault(self._number, now, kind, digest, chunk, message))

    def after(self, number: int) -> list[Fault]:
        """Those with a higher number."""
        return [fault for fault in self._kept if fault.number > number]
