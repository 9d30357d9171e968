"""burst as it runs: heartbeats in, recorded and published plans out, leases kept."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

from devstack.process import free_port
from devstack.supervised import health
from schemas.base import decode, encode
from schemas.burst import BurstPlan
from schemas.node import Heartbeat, Resources
from schemas.subjects import hb
from services.burst import app
from services.burst.handlers import PLAN_SUBJECT
from services.burst.leases import Leases
from services.burst.planner import Plan
from services.burst.settings import Settings
from services.burst.store import Store
from shared.bus import Bus, Outgoing
from shared.db import Database
from shared.errors import InvalidRequest, PolicyDenied, Unavailable
from shared.outbox import Outbox
from shared.topology import declare
from tests.integration.conftest import Stack

pytestmark = pytest.mark.integration

SETTLE_S = 60.0
CAPACITY = Resources(cores=100, memory_mb=100_000, sandboxes=1_000)


@pytest.fixture
async def bus(stack: Stack) -> AsyncIterator[Bus]:
    made = Bus(stack.settings(), "test")
    await made.start()
    await declare(made.js)
    yield made
    await made.close()


@pytest.fixture
async def clean(dsn_of: Callable[[str], str], admin_dsn: str) -> str:
    dsn = dsn_of("burst")
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute("truncate burst.plan, burst.lease, burst.outbox")
    await admin.close()
    return dsn


@pytest.fixture
async def plans(bus: Bus) -> AsyncIterator[list[BurstPlan]]:
    """The plans published during the test."""
    heard: list[BurstPlan] = []

    ids: set[str] = set()

    async def take(msg: Any) -> None:
        id_ = msg.headers["Nats-Msg-Id"]
        if id_ not in ids:  # what is sent again is in the stream once
            ids.add(id_)
            heard.append(decode(msg.data, BurstPlan))

    subscription = await bus.client.subscribe(PLAN_SUBJECT, cb=take)
    await bus.client.flush()
    yield heard
    await subscription.unsubscribe()


def settings(stack: Stack, dsn: str) -> Settings:
    common = stack.settings("burst")
    return Settings(
        nats_url=common.nats_url, nats_user="burst", nats_password=common.nats_password,
        pg_dsn=dsn, health_port=free_port(), burst_every_s=0.05, burst_silent_s=1.0,
    )  # fmt: skip


async def running(made: Settings, stop: asyncio.Event) -> asyncio.Task[None]:
    task = asyncio.create_task(app.main(made, stop))
    async with asyncio.timeout(SETTLE_S):
        while not (await health(made.health_port))[0]:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
    return task


def beat(node: str, share: float, pool: Any = "onprem") -> Outgoing:
    committed = Resources(
        cores=CAPACITY.cores * share, memory_mb=int(CAPACITY.memory_mb * share),
        sandboxes=int(CAPACITY.sandboxes * share),
    )  # fmt: skip
    message = Heartbeat(
        node=node, epoch="e", seq=1, at=time.time(), pool=pool, capacity=CAPACITY,
        committed=committed, used=Resources(),
    )  # fmt: skip
    return Outgoing(hb(node), encode(message))


async def told(
    bus: Bus,
    plans: list[BurstPlan],
    beats: list[Outgoing],
    share: float,
    *,
    cloud: int | None = None,
) -> BurstPlan:
    """The plan of that utilisation (and so many cloud nodes), told while ``beats`` go on: a
    round may come between two beats."""
    async with asyncio.timeout(SETTLE_S):
        while not plans or plans[-1].utilisation != share or cloud not in (None, _cloud(plans[-1])):
            for message in beats:
                await bus.send(message)
            await asyncio.sleep(0.05)
    return plans[-1]


def _cloud(plan: BurstPlan) -> int:
    return plan.pools["cloud"].nodes if "cloud" in plan.pools else 0


async def test_two_instances_tell_one_stream_of_plans(
    stack: Stack, bus: Bus, clean: str, plans: list[BurstPlan], admin_dsn: str
) -> None:
    stop = asyncio.Event()
    tasks = [await running(settings(stack, clean), stop) for _ in range(2)]
    calm = await told(bus, plans, [beat("n1", 0.5)], 0.5)
    assert (calm.lease, calm.share, calm.release) == (0, 0.0, 0)
    busy = await told(bus, plans, [beat("n1", 0.9), beat("c1", 0.5, "cloud")], 0.9, cloud=1)
    assert busy.share == pytest.approx(0.67, abs=0.01)
    assert busy.pools["cloud"].nodes == 1
    hot = await told(bus, plans, [beat("n1", 1.0)], 1.0)
    assert hot.lease >= 1
    assert "nothing is leased: no cloud provider is configured" in hot.reason
    stop.set()
    await asyncio.gather(*tasks)
    admin = await asyncpg.connect(admin_dsn)
    # the last ones may be on their way, or not have been sent before their sender ended
    rows = await admin.fetch("select data from burst.outbox")
    unsent = {decode(row[0], BurstPlan).at for row in rows}
    recorded = await admin.fetchval("select count(*) from burst.plan")
    async with asyncio.timeout(SETTLE_S):
        while len(unsent | {plan.at for plan in plans}) < recorded:
            await asyncio.sleep(0.05)
    assert len(plans) == len({plan.at for plan in plans})
    assert len(unsent | {plan.at for plan in plans}) == recorded
    assert await admin.fetchval("select count(*) from burst.lease") == 0
    rows = await admin.fetch("select utilisation, share, lease from burst.plan order by id")
    pairs = [tuple(row) for row in rows]
    assert all(a != b for a, b in itertools.pairwise(pairs)), pairs
    await admin.close()


async def test_a_node_cannot_beat_for_another(
    stack: Stack, bus: Bus, clean: str, plans: list[BurstPlan]
) -> None:
    stop = asyncio.Event()
    task = await running(settings(stack, clean), stop)
    forged = Outgoing(hb("liar"), beat("n2", 1.0).data)
    plan = await told(bus, plans, [beat("n1", 0.25), forged], 0.25)
    assert plan.pools["onprem"].nodes == 1
    stop.set()
    await task


async def test_an_unknown_provider_and_an_impossible_rule_are_refused(
    stack: Stack, clean: str
) -> None:
    for field, value in (("burst_provider", "nimbus"), ("burst_floor", 0.95)):
        made = settings(stack, clean)
        setattr(made, field, value)
        with pytest.raises(InvalidRequest):
            await app.main(made, asyncio.Event())


class Cloud:
    """A provider in memory with scripted failures."""

    name, supported, reason = "memory", True, ""

    def __init__(self) -> None:
        self.machines: dict[str, str] = {}
        self.orders = 0
        self.fail: list[Exception] = []

    async def lease(self, lease_id: str) -> str:
        self.orders += 1
        if self.fail:
            raise self.fail.pop(0)
        return self.machines.setdefault(lease_id, f"cloud-{len(self.machines)}")

    async def release(self, node: str) -> None:
        if self.fail:
            raise self.fail.pop(0)
        self.machines = {k: v for k, v in self.machines.items() if v != node}


@pytest.fixture
async def store(bus: Bus, clean: str) -> AsyncIterator[Store]:
    db = Database(clean, "burst")
    yield Store(db, Outbox(bus, db), keep_s=3600.0)
    await db.close()


def wish(*, lease: int = 0, release: int = 0) -> Plan:
    return Plan(lease > 0, 0.9, 0.5, lease, release, "because")


async def test_a_lease_is_ordered_once_joins_and_is_given_back(store: Store) -> None:
    cloud = Cloud()
    leases = Leases(store, cloud, max_nodes=5)
    await leases.carry_out(wish(lease=3), [])
    assert len(cloud.machines) == 3
    assert await leases.settle(["cloud-0"]) == 2
    await leases.carry_out(wish(), [])
    assert cloud.orders == 3
    assert await leases.settle(["cloud-0", "cloud-1", "cloud-2"]) == 0
    await leases.carry_out(wish(release=2), ["cloud-0", "cloud-2", "foreign"])
    assert sorted(cloud.machines.values()) == ["cloud-1"]
    assert [x.node for x in await store.leases()] == ["cloud-1"]


async def test_an_order_that_failed_for_now_is_repeated_under_the_same_id(store: Store) -> None:
    cloud = Cloud()
    cloud.fail = [Unavailable("busy"), PolicyDenied("no contract")]
    leases = Leases(store, cloud, max_nodes=5)
    await leases.carry_out(wish(lease=2), [])
    assert cloud.machines == {}
    (open_one,) = await store.leases()
    await leases.carry_out(wish(), [])
    assert list(cloud.machines) == [open_one.lease_id]


async def test_instances_together_do_not_exceed_the_bound(store: Store) -> None:
    cloud = Cloud()
    both = [Leases(store, cloud, max_nodes=4) for _ in range(2)]
    await asyncio.gather(*(leases.carry_out(wish(lease=3), []) for leases in both))
    assert len(cloud.machines) == 4


async def test_a_failed_release_is_finished_later(store: Store) -> None:
    cloud = Cloud()
    leases = Leases(store, cloud, max_nodes=5)
    await leases.carry_out(wish(lease=1), [])
    await leases.settle(["cloud-0"])
    cloud.fail = [Unavailable("busy")]
    await leases.carry_out(wish(release=1), ["cloud-0"])
    assert [x.state for x in await store.leases()] == ["releasing"]
    await leases.carry_out(wish(), [])
    assert (cloud.machines, await store.leases()) == ({}, [])
