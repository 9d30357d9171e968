"""Time limits of a sandbox, kept by a clock that tests set."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.edge.activity import Activity
from services.edge.rules import Times
from services.edge.runclock import RunClock
from services.edge.timekeeping import Timekeeper
from shared.clock import FakeClock


@dataclass
class Bench:
    """One timekeeper and what it called for."""

    times: Times
    clock: FakeClock = field(default_factory=FakeClock)
    calls: list[str] = field(default_factory=list)
    room: bool = True

    def __post_init__(self) -> None:
        self.run = RunClock(self.clock.monotonic)
        self.activity = Activity(self.run)
        self.time = Timekeeper(
            self.times, self.clock, self.activity, started_at=self.clock.now(),
            running=lambda: self.run.runs, idle=self._idle,
            deadline=lambda: self.calls.append("deadline"),
        )  # fmt: skip

    def _idle(self) -> bool:
        if self.room:
            self.calls.append("idle")
        return self.room

    def after(self, seconds: float) -> list[str]:
        """What was called for so far, ``seconds`` later."""
        self.clock.advance(seconds)
        self.time.look()
        self.time.stop()
        return self.calls


async def test_idleness_is_told_once_until_it_is_taken() -> None:
    bench = Bench(Times(idle_s=2.0))
    assert bench.after(1.9) == []
    assert bench.after(0.2) == ["idle"]
    assert bench.after(5.0) == ["idle"]
    assert bench.time.idle_taken()
    assert bench.after(0.0) == ["idle", "idle"]


async def test_idleness_that_found_no_room_is_told_again() -> None:
    bench = Bench(Times(idle_s=2.0), room=False)
    assert bench.after(3.0) == []
    bench.room = True
    assert bench.after(0.0) == ["idle"]


async def test_work_and_renewals_that_came_in_before_it_is_taken_count() -> None:
    """(L17, L19)"""
    bench = Bench(Times(idle_s=2.0))
    assert bench.after(2.0) == ["idle"]
    bench.activity.enter("op", lambda error: None)
    assert not bench.time.idle_taken()
    bench.activity.leave("op")
    assert bench.after(2.0) == ["idle", "idle"]
    bench.time.renew(None, None)
    assert not bench.time.idle_taken()


async def test_a_renewal_at_any_moment_leaves_exactly_one_end() -> None:
    """(L17)"""
    for millis in range(-5, 6):
        bench = Bench(Times(deadline_s=2.0))
        ended = bench.after(2.0 + millis / 1000)
        if not ended:
            bench.time.renew(None, 2.0)
            assert bench.after(1.999) == []
            assert bench.after(0.002) == ["deadline"]
        else:
            assert ended == ["deadline"] and millis >= 0


async def test_paused_time_is_no_idle_time_but_counts_for_the_deadline() -> None:
    bench = Bench(Times(idle_s=2.0, deadline_s=10.0))
    bench.clock.advance(1.0)
    bench.run.stop()
    assert bench.after(8.0) == []
    bench.run.go()
    assert bench.after(0.5) == []
    bench.run.stop()
    assert bench.after(0.6) == ["deadline"]
