"""Nodes: silence, return, join, drain; what the watcher and the reconciler do."""

from __future__ import annotations

import asyncio

import pytest

from schemas.base import ErrorReply, decode, encode
from schemas.iam import IamQuery
from schemas.node import JoinRequest, NodeCommand, NodeList, Resources
from schemas.subjects import cmd, hb, join, rpc
from tests.integration.scheduler.conftest import SILENT, World
from tests.integration.scheduler.world import SimEdge, Trainer, eventually, saw

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def fleet(trainer: Trainer) -> dict[str, str]:
    answer = await trainer.nc.request(rpc("scheduler", "nodes"), encode(IamQuery()), timeout=60)
    return {n.id: n.state for n in decode(answer.data, NodeList).nodes}


async def node_op(trainer: Trainer, verb: str, node: str) -> bytes:
    reply = trainer.nc.new_inbox()
    answers = await trainer.nc.subscribe(reply)
    await trainer.nc.flush()
    body = encode(NodeCommand(request_id="r", node=node, verb=verb))
    await trainer.nc.jetstream(timeout=60).publish(
        cmd("node", "op", node), body, headers={"Dsec-Reply": reply}
    )
    return (await answers.next_msg(timeout=60)).data


async def test_a_silent_node_loses_its_sandboxes(world: World) -> None:
    await world.scheduler(**SILENT)
    gone, here = await world.edge("gone"), await world.edge("here")
    trainer = await world.trainer()
    uids = await trainer.create(20)
    nodes = {r.uid: r.node for r in await trainer.settled(uids)}
    on_gone = [u for u, n in nodes.items() if n == "gone"]
    assert 0 < len(on_gone) < 20
    gone.beating = gone.taking = False
    await eventually(
        lambda: all(trainer.states_told(u) == ["running", "lost"] for u in on_gone)
    )
    for event in trainer.events:
        if event.state == "lost":
            assert (event.cause, event.is_infra, event.node) == ("node_lost", True, "gone")
    assert await fleet(trainer) == {"gone": "lost", "here": "ready"}
    assert await world.committed() == {"gone": 0, "here": 20 - len(on_gone)}
    more = await trainer.create(10)
    assert {r.node for r in await trainer.settled(more)} == {"here"}
    # it comes back with sandboxes that everyone has given up: they are stopped
    gone.beating = gone.taking = True
    await eventually(lambda: not gone.live)
    assert set(here.live) >= set(more)
    await eventually(lambda: _ready(trainer, "gone"))


async def _ready(trainer: Trainer, node: str) -> bool:
    return (await fleet(trainer))[node] == "ready"


async def test_a_short_silence_costs_nothing(world: World) -> None:
    await world.scheduler(silence_s=2.0)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(3)
    await trainer.settled(uids)
    edge.beating = False

    async def lost() -> bool:
        return await fleet(trainer) == {"n1": "lost"}

    await eventually(lost)
    edge.beating = True
    await eventually(lambda: _ready(trainer, "n1"))
    assert await world.states() == {"running": 3}


async def test_a_scheduler_that_hears_nothing_condemns_nobody(world: World) -> None:
    """Two schedulers, one deaf: what the other hears counts."""
    app = await world.scheduler(silence_s=4.0)
    await world.scheduler(silence_s=4.0)
    await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create()
    await trainer.settled(uids)

    async def deaf(*_: object) -> None:
        return

    app.watcher._beats.clear()
    app.watcher.heard = deaf  # type: ignore[method-assign]
    for _ in range(12):
        app.watcher._beats.clear()
        await asyncio.sleep(0.5)
        assert await app.watcher.look() == []
    assert await world.states() == {"running": 1}


async def test_heartbeats_and_joins_under_a_foreign_name_are_refused(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    request = JoinRequest(node="n2", epoch="e", capacity=Resources())
    answer = await edge.nc.request(join("n1"), encode(request), timeout=60)
    assert decode(answer.data, ErrorReply).error.code == "forbidden"
    impostor = SimEdge(world.ends, "n9")
    impostor.nc = edge.nc
    beat = asyncio.create_task(impostor._beat())
    await asyncio.sleep(0.1)
    beat.cancel()
    await edge.nc.publish(hb("n1"), b"{}")  # not a heartbeat: dropped
    await eventually(lambda: _known(trainer, {"n1", "n9"}))


async def _known(trainer: Trainer, nodes: set[str]) -> bool:
    return set(await fleet(trainer)) == nodes


async def test_a_joining_edge_hears_what_to_forget(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(3)
    await trainer.settled(uids)
    await trainer.operate("stop", uids[:1])
    await edge.stop()
    world.drop(edge.stop)
    again = SimEdge(world.ends, "n1")
    again.live = {uids[0]: "running", uids[1]: "running", "0" * 26: "running"}
    reply = await again.start()
    world.add(again.stop)
    assert set(reply.forget) == {uids[0], "0" * 26}
    # the third should be there and is not: without a word it is lost
    await eventually(lambda: trainer.states_told(uids[2]) == ["running", "lost"])
    assert trainer.states_told(uids[1]) == ["running"]


async def test_a_sandbox_reported_after_the_join_is_kept(world: World) -> None:
    await world.scheduler(missing_s=60)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create()
    await trainer.settled(uids)
    generation = edge.started[0].generation
    await edge.stop()
    world.drop(edge.stop)
    again = SimEdge(world.ends, "n1")
    await again.start(live=[])
    world.add(again.stop)
    await again.observe([saw(uids[0], generation, "running")])

    async def cleared() -> bool:
        rows = await world.sql("select deadline_at from sandbox")
        return rows[0][0] is None

    await eventually(cleared)
    assert await world.states() == {"running": 1}


async def test_a_live_stray_is_stopped(world: World) -> None:
    """(B14)"""
    await world.scheduler()
    edge = await world.edge("n1")
    stray = "0" * 26
    edge.live[stray] = "running"
    await edge.observe([saw(stray, 3, "running")])
    await eventually(lambda: stray not in edge.live)


async def test_a_draining_node_is_emptied_and_gets_nothing(world: World) -> None:
    """(B14)"""
    await world.scheduler()
    await world.edge("n1")
    edge = await world.edge("n2")
    trainer = await world.trainer()
    uids = await trainer.create(20)
    nodes = {r.uid: r.node for r in await trainer.settled(uids)}
    await node_op(trainer, "drain", "n2")
    await eventually(lambda: not edge.live)
    drained = [u for u, n in nodes.items() if n == "n2"]
    assert drained
    await eventually(lambda: all(trainer.states_told(u) == ["running", "stopped"] for u in drained))
    ended = [e for e in trainer.events if e.state == "stopped"]
    assert {(e.cause, e.is_infra) for e in ended} == {("node_lost", True)}
    more = await trainer.create(10)
    assert {r.node for r in await trainer.settled(more)} == {"n1"}
    assert (await fleet(trainer))["n2"] == "draining"
    await node_op(trainer, "uncordon", "n2")
    assert (await fleet(trainer))["n2"] == "ready"


async def test_a_cordoned_node_keeps_what_it_has(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    edge = await world.edge("n2")
    trainer = await world.trainer()
    uids = await trainer.create(20)
    await trainer.settled(uids)
    had = set(edge.live)
    await node_op(trainer, "cordon", "n2")
    more = await trainer.create(10)
    assert {r.node for r in await trainer.settled(more)} == {"n1"}
    assert set(edge.live) == had
    unknown = decode(await node_op(trainer, "drain", "nowhere"), ErrorReply)
    assert (unknown.error.code, unknown.error.field) == ("not_found", "node")


async def test_a_node_that_admits_nothing_gets_nothing(world: World) -> None:
    app = await world.scheduler()
    await world.edge("full", admitting=False)
    await world.edge("open")
    trainer = await world.trainer()
    await eventually(
        lambda: {v.id: bool(v.away) for v in app.fleet.views()} == {"full": True, "open": False}
    )
    uids = await trainer.create(10)
    assert {r.node for r in await trainer.settled(uids)} == {"open"}


async def test_a_start_that_nobody_answers_expires(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    edge.on_start = lambda _: []
    trainer = await world.trainer()
    uids = await trainer.create(2, expires_s=6.0)
    for result in await trainer.settled(uids):
        assert result.state == "failed"
        assert result.error is not None
        assert (result.error.code, result.error.cause) == ("deadline_exceeded", "start_timeout")
    await eventually(lambda: {op.uid for v, op in edge.ops if v == "stop"} == set(uids))
    assert await world.committed() == {"n1": 0}
    # a sandbox that comes up after all is not left running
    late = edge.started[0]
    edge.live[late.uid] = "running"
    await edge.observe([saw(late.uid, late.generation, "running")])
    await eventually(lambda: late.uid not in edge.live)


async def test_a_stop_on_a_frozen_node_is_answered_and_carried_out_when_it_wakes(
    world: World,
) -> None:
    await world.scheduler(silence_s=2.0, lost_grace_s=3600.0)
    frozen, well = await world.edge("n1"), await world.edge("n2")
    trainer = await world.trainer()
    uids = await trainer.create(8)
    placed = {r.uid: r.node for r in await trainer.settled(uids)}
    assert set(placed.values()) == {"n1", "n2"}
    frozen.beating = frozen.taking = False
    await asyncio.sleep(2.0)  # what it fetches is over
    for _ in range(2):  # asked again, it says the same
        results = await trainer.operate("stop", uids)
        for uid, result in results.items():
            if placed[uid] == "n2":
                assert (result.state, result.error) == ("stopped", None)
                continue
            assert result.state == "stopping"
            assert result.error is not None
            assert (result.error.code, result.error.retryable) == ("unavailable", True)
            assert "node n1 is silent" in result.error.message
    frozen.beating = frozen.taking = True
    await eventually(lambda: not frozen.live)

    async def stopped() -> bool:
        return await world.states() == {"stopped": 8}

    await eventually(stopped)
    assert not well.live
    assert await world.sql("select 1 from op") == []
    assert await world.committed() == {"n1": 0, "n2": 0}
