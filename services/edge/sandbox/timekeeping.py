"""The time limits of one sandbox, kept.

Owns: the limits in force, a verifier's lease, the timer. Does not own: what is due
(:mod:`services.edge.sandbox.rules`), who may hold a lease
(:mod:`services.edge.sandbox.verifying`), what is activity, what is done about it
(:mod:`services.edge.sandbox.timeup`).

The timer is only a hint: whatever it says, the limits are looked at again when they are
acted on, so that a renewal or work that came in before is never overlooked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from services.edge.sandbox import rules, verifying
from services.edge.sandbox.activity import Activity
from services.edge.sandbox.pauses import PAUSE_S
from services.edge.sandbox.rules import Age, Times
from services.edge.sandbox.verifying import Kept, Scoring
from shared.clock import Clock
from shared.errors import DsecError


class Timekeeper:
    """``running``: whether the sandbox runs. ``turn`` and ``end`` are called when time is
    up: ``end`` where nothing holds that off, with the cause; ``turn`` for all that is done
    in turn with the sandbox's operations, and, once it said that it will be seen to, not
    again until :meth:`taken`. ``held_max_s`` bounds what a verifier's lease holds off."""

    def __init__(
        self, times: Times, clock: Clock, activity: Activity, *, started_at: float,
        running: Callable[[], bool], turn: Callable[[], bool], end: Callable[[str], None],
        kept: Kept | None = None, held_max_s: float = 0.0,
    ) -> None:  # fmt: skip
        self.times = times
        self.kept = kept or Kept()
        self.started_at = started_at
        self.judged_at = self.kept.asked_at
        """When the newest limits that came were asked for."""
        self.cleared = self.kept.scoring is not None
        self._clock = clock
        self._activity = activity
        self._running = running
        self._turn = turn
        self._end = end
        self._held_max_s = held_max_s
        self._told = False
        self._timer: asyncio.TimerHandle | None = None

    def started(self, at: float) -> None:
        """The sandbox runs since ``at``: its deadline counts from there."""
        self.started_at = at

    def renew(self, idle_s: float | None, deadline_s: float | None, *, asked_at: float) -> None:
        """New limits, from now on; those that were asked for before the ones in force, and
        those that come when time was up, change nothing."""
        if asked_at < self.kept.asked_at or self.kept.scoring is not None:
            return
        age_s = self._clock.now() - self.started_at
        self.times = self.times.renewed(idle_s, deadline_s, age_s=age_s)
        self.kept = replace(self.kept, asked_at=asked_at)
        self._activity.touch()

    # -- verifiers ---------------------------------------------------------------------

    def take(self, holder: str, lease_s: float, *, alone: bool) -> tuple[float, float]:
        """A verifier takes or renews its lease; for how long it is held, and can be. Raises
        ``Conflict``."""
        now, most = self._clock.now(), self._held_max_s
        self.kept = verifying.taken(self.kept, holder, lease_s, now=now, max_s=most, alone=alone)
        assert self.kept.lease is not None
        self._activity.touch()
        return self.kept.lease.until - now, self.kept.lease.ends - now

    def release(self, holder: str) -> None:
        """A verifier gives its lease back."""
        self.kept = verifying.released(self.kept, holder)
        self._activity.touch()

    def refusal(self, holder: str) -> DsecError | None:
        """Why an operation under this lease ("": none) is not let in, if it is not."""
        kept = self.kept
        if kept.scoring is None and kept.lease is None:
            return None  # nearly every sandbox
        return verifying.refusal(kept, holder, cleared=self.cleared, now=self._clock.now())

    def score(self, cause: str) -> Scoring:
        """From now on it stands for verifiers alone, once it is :attr:`cleared`."""
        at = self._clock.now()
        if cause == "deadline" and self.times.deadline_s is not None:
            at = self.started_at + self.times.deadline_s
        scoring = Scoring(cause, at)
        self.kept = replace(self.kept, scoring=scoring)
        return scoring

    @property
    def up(self) -> str | None:
        """Which limit was reached, where it stands for verifiers alone."""
        return self.kept.scoring.cause if self.kept.scoring else None

    @property
    def durable(self) -> Kept:
        """What a new edge process is to know: where the agent's processes may still be
        there, that time is up comes to it anew."""
        return self.kept if self.cleared else replace(self.kept, scoring=None)

    # -- what is due ---------------------------------------------------------------------

    def due(self) -> rules.Due:
        """Whether time is up now."""
        return rules.due(self.times, self._age(), held_max_s=self._held_max_s)

    def _age(self) -> Age:
        now, scoring = self._clock.now(), self.kept.scoring
        return Age(
            age_s=now - self.started_at, idle_s=self._activity.idle_s, runs=self._running(),
            held_s=self.kept.held_s(now),
            scoring=(scoring.cause, now - scoring.at) if scoring else None,
        )  # fmt: skip

    def look(self) -> None:
        """Looks at the clock, now and when the next limit may be reached."""
        self.stop()
        due = self.due()
        wait_s = due.wait_s
        if due.cause is not None:
            if due.then == "end" and (self.kept.scoring or due.cause == "deadline"):
                self._end(due.cause)
                return
            wait_s = PAUSE_S  # asked for: if it comes to nothing, again
            self._told = self._told or self._turn()
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(wait_s, self.look)

    def taken(self) -> rules.Due:
        """What is due, for whoever acts on it now."""
        self._told = False
        return self.due()

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
