"""Whose lease ran out, and who only was not heard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.scheduler import jobs as module
from services.scheduler.jobs import Jobs
from services.scheduler.leases import LEASED, Job
from services.scheduler.settings import Settings

LATE_S, LEASE_S = 5.0, 60.0


class World:
    """One job that nobody renews, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.connected, self.away = 1000.0, True, False
        self.job = Job(
            project="team", id="run", state=LEASED, epoch=1, holder="h", principal="p",
            lease_s=LEASE_S, lease_until=0.0, on_lost="stop", lapsed_at=None, stopped_at=None,
            changed_at=0.0,
        )  # fmt: skip
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.jobstore, "lock_lapsing", self._lapsing)
        monkeypatch.setattr(module.jobstore, "save", self._save)
        settings = Settings(pg_dsn="", redis_url="", lease_late_s=LATE_S)
        self.jobs = Jobs(
            cast("Any", SimpleNamespace(settings=settings)), cast("Any", self),
            connected=lambda: self.connected,
        )  # fmt: skip

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield

    async def _lapsing(self, *_: object) -> list[Job]:
        return [self.job]

    async def _save(self, _: object, jobs: Collection[Job]) -> None:
        return

    async def lost_after(self, seconds: float, *, each_s: float = 1.0) -> float | None:
        """When the job is lost, looking at it for so long."""
        begun = self.now
        while self.now < begun + seconds:
            self.now += each_s
            if await self.jobs.lapse():
                return self.now - begun
        return None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_a_lease_is_lost_when_it_was_listened_for_so_long(world: World) -> None:
    world.now += 20.0  # until the bus was there
    lost_s = await world.lost_after(LEASE_S * 2)
    assert lost_s is not None
    assert lost_s > LEASE_S + LATE_S


@pytest.mark.parametrize("stood_s", [LATE_S + module.STOOD * LEASE_S + 1, LEASE_S * 3])
async def test_a_scheduler_that_stood_still_loses_no_job(world: World, stood_s: float) -> None:
    """Nor one that could not reach its database: what renewed the lease is not handled yet."""
    assert await world.lost_after(LEASE_S) is None
    world.now += stood_s
    lost_s = await world.lost_after(LEASE_S * 2)
    assert lost_s is not None
    assert lost_s >= LEASE_S + LATE_S


async def test_an_outage_of_the_bus_loses_no_job(world: World) -> None:
    assert await world.lost_after(LEASE_S) is None
    world.connected = False
    assert await world.lost_after(LEASE_S * 2) is None
    world.connected = True
    assert await world.lost_after(LEASE_S * 2) == LEASE_S + LATE_S


async def test_slow_looks_are_no_standstill(world: World) -> None:
    assert await world.lost_after(LEASE_S * 3, each_s=LATE_S * 2) is not None
