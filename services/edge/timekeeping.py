"""The time limits of one sandbox, kept.

Owns: the limits in force, the timer. Does not own: what is due (:mod:`services.edge.rules`),
what is activity, what is done about it (the actor).

The timer is only a hint: whatever it says, the limits are looked at again when they are
acted on, so that a renewal or work that came in before is never overlooked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.edge import rules
from services.edge.activity import Activity
from services.edge.pauses import PAUSE_S
from services.edge.rules import Times
from shared.clock import Clock


class Timekeeper:
    """``running``: whether the sandbox runs. ``idle`` and ``deadline`` are called when
    time is up; ``idle``, once it said that it will be seen to, not again until
    :meth:`idle_taken`."""

    def __init__(
        self, times: Times, clock: Clock, activity: Activity, *, started_at: float,
        running: Callable[[], bool], idle: Callable[[], bool], deadline: Callable[[], None],
    ) -> None:  # fmt: skip
        self.times = times
        self.started_at = started_at
        self._clock = clock
        self._activity = activity
        self._running = running
        self._idle = idle
        self._deadline = deadline
        self._idle_told = False
        self._timer: asyncio.TimerHandle | None = None

    def started(self, at: float) -> None:
        """The sandbox runs since ``at``: its deadline counts from there."""
        self.started_at = at

    def renew(self, idle_s: float | None, deadline_s: float | None) -> None:
        """New limits, from now on."""
        age_s = self._clock.now() - self.started_at
        self.times = self.times.renewed(idle_s, deadline_s, age_s=age_s)
        self._activity.touch()

    def due(self) -> rules.Due:
        """Whether time is up now."""
        return rules.due(
            self.times, age_s=self._clock.now() - self.started_at,
            idle_s=self._activity.idle_s, running=self._running(),
        )  # fmt: skip

    def look(self) -> None:
        """Looks at the clock, now and when the next limit may be reached."""
        self.stop()
        due = self.due()
        wait_s = due.wait_s
        if due.cause == "deadline":
            self._deadline()
            return
        if due.cause == "idle_timeout":
            wait_s = PAUSE_S  # asked for: if it comes to nothing, again
            self._idle_told = self._idle_told or self._idle()
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.look)

    def idle_taken(self) -> bool:
        """Whether it is idle too long, for whoever acts on it now."""
        self._idle_told = False
        return self.due().cause == "idle_timeout"

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
