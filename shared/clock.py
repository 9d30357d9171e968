"""Time as a value that tests can set. Owns nothing else."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time in seconds since the epoch, and a monotonic one in seconds."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


class FakeClock:
    """A clock that stands still until :meth:`advance`."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self._now = now

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds
