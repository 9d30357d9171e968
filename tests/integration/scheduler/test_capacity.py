"""Reservation, refusal and another node, rejection; two schedulers at once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from schemas.base import WireError
from services.scheduler import nodes
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import eventually, saw

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_a_hundred_creates_on_two_nodes_of_ten(world: World) -> None:
    """(B11)"""
    for _ in range(2):
        await world.scheduler()
    edges = [await world.edge("n1", 10), await world.edge("n2", 10)]
    trainer = await world.trainer()
    sent = await asyncio.gather(*(trainer.create(expires_s=600.0) for _ in range(100)))

    async def full() -> bool:
        return await world.states() == {"running": 20, "requested": 80}

    await eventually(full)
    # the time of those that wait is over
    await world.sql(
        "update sandbox set expires_at = now(), deadline_at = now() where state = 'requested'"
    )
    results = await trainer.settled([u for uids in sent for u in uids])
    states = Counter(r.state for r in results)
    assert states == {"running": 20, "rejected": 80}
    for result in results:
        if result.state == "rejected":
            assert result.error is not None
            assert result.error.code == "capacity_exhausted"
            assert result.error.retry_after_s
    assert [len(e.live) for e in edges] == [10, 10]
    assert [e.refused_for_room for e in edges] == [0, 0]
    assert await world.committed() == {"n1": 10, "n2": 10}


async def test_a_refused_sandbox_runs_elsewhere(world: World) -> None:
    await world.scheduler(start_again_s=60)
    bad, good = await world.edge("bad"), await world.edge("good")
    bad.on_start = lambda _: ["refused"]
    trainer = await world.trainer()
    uids = await trainer.create(40)
    assert {r.node for r in await trainer.settled(uids)} == {"good"}
    assert len(good.live) == 40
    assert len({i.uid for i in bad.started}) == len(bad.started) > 0  # each asked once
    assert await world.committed() == {"bad": 0, "good": 40}


async def test_a_sandbox_that_every_node_refuses_is_rejected_with_their_reason(
    world: World,
) -> None:
    await world.scheduler()
    trainer = await world.trainer()
    edge = await world.edge("n1")
    edge.on_start = lambda _: []
    uids = await trainer.create()
    start = (await eventually(lambda: edge.started))[0]
    error = WireError(code="policy_denied", message="no enforcer", field="network_rules")
    await edge.observe([saw(uids[0], start.generation, "refused", error=error)])
    (result,) = await trainer.settled(uids)
    assert (result.state, result.error) == ("rejected", error)
    assert await world.committed() == {"n1": 0}


async def test_an_unsupported_backend_is_a_typed_error(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(backend="vm")
    (result,) = await trainer.settled(uids)
    assert result.error is not None
    assert (result.error.code, result.error.field) == ("unsupported", "backend")


async def test_two_schedulers_lose_and_double_nothing(world: World) -> None:
    apps = [await world.scheduler(start_again_s=60) for _ in range(2)]
    edges = [await world.edge(f"n{i}", 400) for i in range(3)]
    trainers = [await world.trainer(), await world.trainer("other")]

    async def storm(index: int) -> list[str]:
        trainer = trainers[index % 2]
        uids: list[str] = []
        for _ in range(6):
            command = trainer.command(10)
            uids += await trainer.send(command)
            await trainer.send(command)  # at least once: everything comes twice
            await trainer.op("stop", uids[-10:-5])
        return uids

    sent = await asyncio.gather(*(storm(i) for i in range(10)))
    everyone = [u for uids in sent for u in uids]
    stopped = [u for uids in sent for i in range(0, 60, 10) for u in uids[i : i + 5]]

    async def calm() -> bool:
        return await world.states() == {"running": 300, "stopped": 300}

    await eventually(calm)
    assert all(c.handled for a in apps for c in a.consumers)  # both worked
    live = [u for e in edges for u in e.live]
    assert sorted(live) == sorted(set(everyone) - set(stopped))
    starts = Counter(i.uid for e in edges for i in e.started)
    assert max(starts.values()) == 1
    async with apps[0].db.transaction() as connection:
        assert await nodes.drift(connection) == []
    await eventually(
        lambda: all(u in t.results for i, t in enumerate(trainers) for s in sent[i::2] for u in s)
    )

    async def sent_all() -> bool:
        return not await world.sql("select 1 from outbox limit 1")

    await eventually(sent_all)
    told = Counter((e.uid, e.state) for t in trainers for e in t.events)
    assert set(told.values()) == {1}
    assert sum(1 for _, state in told if state == "stopped") == 300


async def test_one_large_batch(world: World) -> None:
    await world.scheduler()
    edges = [await world.edge("n1", 5000), await world.edge("n2", 5000)]
    trainer = await world.trainer()
    uids = await trainer.create(6000, job="big")
    results = await trainer.settled(uids, within_s=120)
    assert {r.state for r in results} == {"running"}
    counts = sorted(len(e.live) for e in edges)
    assert counts[1] - counts[0] <= 3000 * 0.1 + 2
    done = await trainer.operate("stop", [], job="big")
    assert Counter(r.state for r in done.values()) == {"stopped": 6000}
    assert await world.committed() == {"n1": 0, "n2": 0}
