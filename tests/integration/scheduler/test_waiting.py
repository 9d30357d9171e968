"""Creates that find no room wait for it: within their time, in turn, in bounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from schemas.base import WireError
from schemas.sandbox import ItemResult
from services.scheduler.app import App
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import SimEdge, Trainer, eventually, saw

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]
BUSY = "over cpu pressure 0.98"


async def in_queue(world: World, count: int) -> None:
    async def there() -> bool:
        rows = await world.sql(
            "select 1 from sandbox where state = 'requested' and cause = 'capacity'"
        )
        return len(rows) == count

    await eventually(there, what=f"{count} in the queue")


async def one_more_waits(world: World, trainer: Trainer, count: int) -> list[str]:
    """Creates one that waits as the ``count``-th: those of one millisecond have no order."""
    uids = await trainer.create()
    await in_queue(world, count)
    return uids


async def busy_edge(world: World, node: str, **kw: Any) -> SimEdge:
    edge = await world.edge(node, admitting=False, refusing=BUSY, **kw)
    app = world.apps[0]

    def known() -> bool:
        return any(v.id == node and v.away == BUSY for v in app.fleet.views())

    await eventually(known)
    return edge


def refused(result: ItemResult) -> WireError:
    assert result.state == "rejected"
    assert result.error is not None
    assert result.error.code == "capacity_exhausted"
    return result.error


async def test_a_create_waits_for_a_node_that_is_busy_for_a_moment(world: World) -> None:
    await world.scheduler(start_again_s=60)
    trainer = await world.trainer()
    edge = await busy_edge(world, "n1")
    command = trainer.command()
    uids = await trainer.send(command)
    await in_queue(world, 1)
    await trainer.send(command)  # the same once more: it waits on, and says so
    (waiting,) = await trainer.settled(uids)
    assert (waiting.state, waiting.error) == ("requested", None)
    edge.beat = {"admitting": True}

    async def running() -> bool:
        return trainer.results[uids[0]].state == "running"

    await eventually(running)
    await eventually(lambda: trainer.states_told(uids[0]) == ["running"])
    assert len(edge.started) == 1


async def test_one_that_waited_in_vain_hears_what_every_node_was_out_of(world: World) -> None:
    await world.scheduler(silence_s=2.0)
    trainer = await world.trainer()
    await busy_edge(world, "n1")
    silent = await world.edge("n2")
    await eventually(lambda: any(v.id == "n2" for v in world.apps[0].fleet.views()))
    silent.beating = False

    def lost() -> bool:
        return any(v.id == "n2" and v.away == "lost" for v in world.apps[0].fleet.views())

    await eventually(lost)
    begun = asyncio.get_running_loop().time()
    (result,) = await trainer.settled(await trainer.create(expires_s=5.0))
    assert asyncio.get_running_loop().time() - begun > 1.0
    error = refused(result)
    assert error.message == f"2 nodes: 1 lost, 1 {BUSY}"
    assert (error.retryable, error.is_infra) == (True, True)


async def test_what_no_node_is_large_enough_for_is_refused_at_once(world: World) -> None:
    await world.scheduler()
    trainer = await world.trainer()
    await world.edge("n1")
    await eventually(lambda: world.apps[0].fleet.views())
    uids = await trainer.create(memory_limit_mb=2_000_000, expires_s=600)
    error = refused((await trainer.settled(uids))[0])
    assert "not large enough" in error.message
    assert not error.retryable


async def test_two_projects_take_turns_and_a_stop_leaves_the_queue(world: World) -> None:
    await world.scheduler()
    first, second = await world.trainer(), await world.trainer("other")
    edge = await world.edge("n1", 1)
    holders = await first.create()
    await first.settled(holders)
    large = await first.create(4)
    await in_queue(world, 4)
    late = await second.create(2)
    await in_queue(world, 6)
    stopped = await first.operate("stop", large[3:])
    assert stopped[large[3]].state == "stopped"
    await in_queue(world, 5)
    for _ in range(5):
        holders += await next_of(first, second, edge)
    assert holders[1:] == [large[0], late[0], large[1], late[1], large[2]]
    assert await world.committed() == {"n1": 1}


async def next_of(first: Trainer, second: Trainer, edge: SimEdge) -> list[str]:
    """Ends what runs; returns what runs then."""
    (uid,) = edge.live
    trainer = first if uid in first.results else second
    await trainer.operate("stop", [uid])
    await eventually(lambda: edge.live)
    (now,) = edge.live
    await eventually(lambda: now in {**first.results, **second.results})
    return [now]


@dataclass(frozen=True)
class Full:
    """One node with room for one sandbox, which ``holder`` has. Nobody looks for room by the
    clock."""

    app: App
    trainer: Trainer
    edge: SimEdge
    holder: list[str]


@pytest_asyncio.fixture(loop_scope="module")
async def full(world: World) -> Full:
    app = await world.scheduler(wait_look_s=3600.0, view_refresh_s=3600.0)
    trainer = await world.trainer()
    edge = await world.edge("n1", 1)
    await app.fleet.refresh()
    holder = await trainer.create()
    await trainer.settled(holder)
    return Full(app, trainer, edge, holder)


async def test_room_is_given_to_those_that_wait_without_a_look_for_it(
    world: World, full: Full
) -> None:
    trainer, edge, holder = full.trainer, full.edge, full.holder
    second, third, fourth = [await one_more_waits(world, trainer, n) for n in range(1, 4)]
    await trainer.operate("stop", holder)  # a sandbox that ends makes room
    assert (await trainer.settled(second))[0].state == "running"
    await in_queue(world, 2)
    edge.room = 2  # and so does a node that says it has more
    assert (await trainer.settled(third))[0].state == "running"
    await in_queue(world, 1)
    await world.edge("n2", 1)  # and one that is new
    assert (await trainer.settled(fourth))[0].node == "n2"


async def test_new_creates_do_not_overtake_those_that_wait(world: World, full: Full) -> None:
    """(B15)"""
    app, trainer, edge, holder = full.app, full.trainer, full.edge, full.holder
    old = await trainer.create()
    await in_queue(world, 1)
    await app.reconciler.close()  # only what is new looks at the queue
    await trainer.operate("stop", holder)
    await app.fleet.refresh()
    new = await trainer.create()
    await trainer.settled(old)
    assert set(edge.live) == set(old)
    await in_queue(world, 1)
    assert new[0] not in trainer.results


async def test_the_queue_is_bounded_and_survives_its_scheduler(world: World) -> None:
    app = await world.scheduler(wait_rows=3)
    trainer = await world.trainer()
    edge = await busy_edge(world, "n1")
    uids = await trainer.create(5)
    await in_queue(world, 3)
    await eventually(lambda: len(trainer.results) == 2)
    over = [uid for uid in uids if uid in trainer.results]
    for uid in over:
        assert "3 creates wait" not in refused(trainer.results[uid]).message  # it was empty
        assert "(wait_rows)" in refused(trainer.results[uid]).message
    world.forget(app)
    await app.close()
    edge.beat = {"admitting": True}
    await world.scheduler()
    results = await trainer.settled(uids)
    assert sorted(r.state for r in results) == ["rejected"] * 2 + ["running"] * 3


async def test_an_edge_that_refuses_for_a_moment_is_asked_again(world: World) -> None:
    await world.scheduler(start_again_s=60)
    trainer = await world.trainer()
    edge = await world.edge("n1")
    edge.on_start = lambda _: []
    uids = await trainer.create()
    start = (await eventually(lambda: edge.started))[0]
    edge.on_start = lambda _: ["starting", "running"]
    error = WireError(code="capacity_exhausted", message="cpu pressure 0.99 over 0.98")
    await edge.observe([saw(uids[0], start.generation, "refused", error=error)])
    (result,) = await trainer.settled(uids)
    assert (result.state, result.node) == ("running", "n1")
    assert [s.generation for s in edge.started] == [1, 2]
