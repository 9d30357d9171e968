"""Time limits of a sandbox, kept by a clock that tests set."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from services.edge.sandbox.activity import Activity
from services.edge.sandbox.rules import Times
from services.edge.sandbox.runclock import RunClock
from services.edge.sandbox.timekeeping import Timekeeper
from shared.clock import FakeClock
from shared.errors import Conflict


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
            running=lambda: self.run.runs, turn=self._turn, end=self.calls.append,
            held_max_s=100.0,
        )  # fmt: skip

    def _turn(self) -> bool:
        if self.room:
            self.calls.append(f"turn: {self.time.due().cause}")
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
    assert bench.after(0.2) == ["turn: idle_timeout"]
    assert bench.after(5.0) == ["turn: idle_timeout"]
    assert bench.time.taken().cause == "idle_timeout"
    assert bench.after(0.0) == ["turn: idle_timeout", "turn: idle_timeout"]


async def test_idleness_that_found_no_room_is_told_again() -> None:
    bench = Bench(Times(idle_s=2.0), room=False)
    assert bench.after(3.0) == []
    bench.room = True
    assert bench.after(0.0) == ["turn: idle_timeout"]


async def test_work_and_renewals_that_came_in_before_it_is_taken_count() -> None:
    """(L17, L19)"""
    bench = Bench(Times(idle_s=2.0))
    assert bench.after(2.0) == ["turn: idle_timeout"]
    bench.activity.enter("op", lambda error: None)
    assert bench.time.taken().cause is None
    bench.activity.leave("op")
    assert bench.after(2.0) == ["turn: idle_timeout", "turn: idle_timeout"]
    bench.time.renew(None, None, asked_at=1.0)
    assert bench.time.taken().cause is None


async def test_a_renewal_at_any_moment_leaves_exactly_one_end() -> None:
    """(L17)"""
    for millis in range(-5, 6):
        bench = Bench(Times(deadline_s=2.0))
        ended = bench.after(2.0 + millis / 1000)
        if not ended:
            bench.time.renew(None, 2.0, asked_at=1.0)
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


async def test_limits_asked_for_earlier_do_not_replace_later_ones() -> None:
    """(L17)"""
    bench = Bench(Times(deadline_s=5.0))
    bench.time.renew(None, 60.0, asked_at=20.0)
    bench.time.renew(None, 1.0, asked_at=19.0)
    assert bench.after(59.0) == []
    bench.time.renew(None, 10.0, asked_at=21.0)
    assert bench.after(9.0) == []
    assert bench.after(2.0) == ["deadline"]


async def test_a_lease_holds_the_end_off_until_it_is_over() -> None:
    for ends in ("given back", "silent"):
        bench = Bench(Times(idle_s=5.0, deadline_s=10.0))
        bench.time.take("v", 30.0, alone=False)
        assert bench.after(29.0) == []
        if ends == "given back":
            bench.time.release("v")
            assert bench.after(0.0) == ["deadline"]
        else:
            assert bench.after(2.0) == ["deadline"]


async def test_renewals_hold_for_no_longer_than_the_bound() -> None:
    bench = Bench(Times(deadline_s=10.0))
    for _ in range(12):
        with contextlib.suppress(Conflict):
            bench.time.take("v", 30.0, alone=False)
        ended = bench.after(10.0)
    assert ended[:1] == ["deadline"]
    assert bench.clock.now() - bench.time.started_at >= 100.0


async def test_time_that_is_up_leaves_time_for_scoring_once() -> None:
    bench = Bench(Times(deadline_s=10.0, scoring_s=20.0))
    assert bench.after(11.0) == ["turn: deadline"]
    assert bench.time.taken().then == "score"
    bench.time.score("deadline")
    assert bench.time.refusal("v") is not None  # it is not cleared yet
    assert bench.time.durable.scoring is None
    bench.time.cleared = True
    assert bench.time.durable.scoring is not None
    assert bench.after(18.0) == ["turn: deadline"]
    bench.time.take("v", 30.0, alone=False)
    assert bench.time.refusal("v") is None and bench.time.refusal("") is not None
    assert bench.after(29.0) == ["turn: deadline"]
    assert bench.after(2.0) == ["turn: deadline", "deadline"]


async def test_a_renewal_after_time_was_up_changes_nothing() -> None:
    bench = Bench(Times(deadline_s=10.0, scoring_s=20.0))
    bench.after(10.0)
    bench.time.score("deadline")
    bench.time.renew(None, 1_000.0, asked_at=5.0)
    assert bench.time.times.deadline_s == 10.0
