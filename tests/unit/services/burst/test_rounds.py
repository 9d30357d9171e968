"""A plan does not end because nobody could be heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from schemas.node import Heartbeat, Resources
from services.burst.handlers import Handlers
from services.burst.planner import Plan, Rule
from shared.bus import Incoming
from shared.clock import FakeClock

SILENT_S = 5.0
CAPACITY = Resources(cores=100, memory_mb=100_000, sandboxes=1_000)


class World:
    """Burst without a provider, one on-prem node, and the clock."""

    def __init__(self) -> None:
        self.clock, self.connected = FakeClock(), True
        self.told: list[Plan] = []
        self.handlers = self.begin()

    def begin(self) -> Handlers:
        store = SimpleNamespace(tell=self._tell, last_plan=self._last)
        provider: Any = SimpleNamespace(supported=False, reason="none here", name="none")
        return Handlers(
            cast("Any", store), provider, Rule(), self.clock, silent_s=SILENT_S, repeat_s=3600.0,
            connected=lambda: self.connected,
        )  # fmt: skip

    async def _tell(self, plan: Plan, *_: object, **__: object) -> bool:
        self.told.append(plan)
        return True

    async def _last(self) -> Plan | None:
        return self.told[-1] if self.told else None

    async def round(self, taken: float | None) -> Plan:
        """A round a second later; ``taken``: of what the node has, ``None``: not heard."""
        self.clock.advance(1.0)
        if taken is not None:
            committed = Resources(cores=taken * 100, memory_mb=0, sandboxes=0)
            beat = Heartbeat(
                node="n1", epoch="e", seq=1, at=0.0, pool="onprem", capacity=CAPACITY,
                committed=committed, used=Resources(), admitting=True,
            )  # fmt: skip
            incoming = Incoming("dsec.hb.v1.n1", {}, "")
            await self.handlers.heartbeat(beat, incoming)
        return await self.handlers.round()


@pytest.mark.parametrize("why", ["it stood still", "the bus was away", "it began anew"])
async def test_bursting_goes_on_where_nobody_could_be_heard(why: str) -> None:
    world = World()
    for _ in range(10):
        assert (await world.round(0.9)).bursting
    told = len(world.told)
    if why == "it stood still":
        world.clock.advance(60.0)
    elif why == "the bus was away":
        world.connected = False
        for _ in range(20):
            await world.round(None)
        world.connected = True
    else:
        world.handlers = world.begin()
    await world.round(None)
    await world.round(None)
    for _ in range(10):
        assert (await world.round(0.75)).bursting, "hysteresis was lost"
    assert all(plan.bursting for plan in world.told[told:])


async def test_silence_that_was_listened_to_ends_it() -> None:
    world = World()
    for _ in range(10):
        await world.round(0.9)
    plans = [await world.round(None) for _ in range(int(SILENT_S) + 2)]
    assert not plans[-1].bursting
