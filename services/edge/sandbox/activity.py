"""What counts as activity of a sandbox.

Owns: which operations run in it, when the last one ended, how much output they lost, which
of them audit is to hear of.
Does not own: what idleness leads to (:mod:`services.edge.sandbox.rules`, the actor).

Idleness is measured on the sandbox's own clock, so paused time is none of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.edge.sandbox.runclock import RunClock
from shared.errors import DsecError

MAX_NOTED = 64
"""Commands that may wait to be told; of more the newest."""

Abort = Callable[[DsecError], None]


class Activity:
    """Of one sandbox, by ``clock``."""

    def __init__(self, clock: RunClock) -> None:
        self._clock = clock
        self._busy: dict[object, tuple[Abort, str]] = {}
        self._left = asyncio.Event()
        self.execs = 0
        """Commands that were begun, since the edge's start."""
        self.dropped_bytes = 0
        """Output of commands that nobody got, since the edge's start."""
        self.noted: deque[str] = deque(maxlen=MAX_NOTED)
        """Bare forms of commands that audit is to hear of."""
        self.at = clock.now()

    def touch(self) -> None:
        """Something was done."""
        self.at = self._clock.now()

    def enter(self, key: object, abort: Abort, *, holder: str = "") -> None:
        """An operation begins: activity until :meth:`leave`. ``abort`` ends it early;
        ``holder``: under whose lease it is."""
        self._busy[key] = abort, holder
        self.touch()

    def leave(self, key: object) -> None:
        """The operation has ended."""
        self._busy.pop(key, None)
        if not self._left.is_set():
            self._left.set()
        self.touch()

    def abort(self, error: DsecError, *, spare: str | None = None) -> None:
        """Ends every operation, but for those under the lease of ``spare``."""
        for abort, holder in list(self._busy.values()):
            if holder != spare:
                abort(error)

    async def left(self, *, spare: str | None = None) -> None:
        """Returns when every operation has ended, but for those of ``spare``."""
        while any(holder != spare for _, holder in self._busy.values()):
            self._left.clear()
            await self._left.wait()

    @property
    def count(self) -> int:
        """Operations that run."""
        return len(self._busy)

    @property
    def idle_s(self) -> float:
        """Seconds since the last activity."""
        return 0.0 if self._busy else max(0.0, self._clock.now() - self.at)
