"""The clock of a sandbox: seconds that it has run. It stands still with it.

Owns: paused time, and limits that do not count it. Does not own: who pauses
(:mod:`services.edge.sandbox.pauses`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class RunClock:
    """Runs from its making on. ``monotonic`` counts seconds."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._stood_s = 0.0
        self._stopped_at: float | None = None
        self._limits: dict[asyncio.Timeout, float] = {}

    @property
    def runs(self) -> bool:
        """Whether it goes on now."""
        return self._stopped_at is None

    def stood_s(self) -> float:
        """Seconds that it stood still so far."""
        since = self._stopped_at
        return self._stood_s + (0.0 if since is None else self._monotonic() - since)

    def now(self) -> float:
        """Seconds that do not count paused time; only differences mean something."""
        if self._stopped_at is None:
            return self._monotonic() - self._stood_s
        return self._monotonic() - self.stood_s()

    def stop(self) -> None:
        """The sandbox stands still."""
        if self._stopped_at is not None:
            return
        self._stopped_at = self._monotonic()
        now = asyncio.get_running_loop().time()
        for limit in self._limits:
            when = limit.when()
            if when is not None and not limit.expired():
                self._limits[limit] = when - now
                limit.reschedule(None)

    def go(self) -> None:
        """The sandbox goes on."""
        if self._stopped_at is None:
            return
        self._stood_s, self._stopped_at = self.stood_s(), None
        now = asyncio.get_running_loop().time()
        for limit, left_s in self._limits.items():
            if not limit.expired():
                limit.reschedule(now + left_s)

    @asynccontextmanager
    async def timeout(self, seconds: float | None) -> AsyncIterator[None]:
        """As ``asyncio.timeout``, of seconds that the sandbox runs."""
        if seconds is None:
            yield
            return
        async with asyncio.timeout(seconds if self.runs else None) as limit:
            self._limits[limit] = seconds
            try:
                yield
            finally:
                del self._limits[limit]
