"""When an edge looks less often for what came."""

from __future__ import annotations

import asyncio
import time

import pytest

from services.edge.door import pacing
from services.edge.door.pacing import MANY, PAUSE_MAX_S, WINDOW_S, Pacing, pause_s

CROWD = {"messages": 100, "waited_s": 0.03, "seconds": 0.05, "in_flight": 64}


def test_a_crowd_on_a_machine_without_a_free_core_is_looked_at_less_often() -> None:
    assert 0 < pause_s(**CROWD) <= PAUSE_MAX_S


@pytest.mark.parametrize(
    "quiet",
    [{"messages": 10}, {"waited_s": 0.001}, {"in_flight": MANY - 1}, {"waited_s": 0.0}],
    ids=["few messages", "a core is free", "few operations", "a kernel that does not count"],
)
def test_whoever_could_be_answered_at_once_is(quiet: dict[str, float]) -> None:
    assert pause_s(**{**CROWD, **quiet}) == 0


def test_fewer_operations_wait_shorter() -> None:
    """A pause must not be what they wait for."""
    assert pause_s(**{**CROWD, "in_flight": MANY}) < pause_s(**CROWD)


def test_the_kernel_says_how_long_this_thread_waited() -> None:
    before = pacing.waited()
    end = time.monotonic() + 0.01
    while time.monotonic() < end:
        pass
    assert before > 0 and pacing.waited() >= before


def test_answers_are_written_before_the_loop_rests() -> None:
    seen: list[str] = []
    now = 100.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        seen.append(f"rests {seconds * 1e3:.2f} ms")

    async def main() -> None:
        nonlocal now
        loop = asyncio.get_running_loop()
        paced = Pacing(waited=lambda: now, now=lambda: now, sleep=sleep)
        for _ in range(1000):
            paced.came(64)
        now += 2 * WINDOW_S  # in which so many came, and no core was free
        for _ in range(2):
            paced.came(64)
            loop.call_soon(seen.append, "written")
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        now += 2 * WINDOW_S
        paced.came(64)  # in which nobody came
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert seen == ["written", "written", "rests 3.84 ms"]
