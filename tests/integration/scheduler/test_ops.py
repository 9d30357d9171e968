"""Operations: selection, repetition, every state, answers that get lost."""

from __future__ import annotations

import asyncio

import pytest

from schemas.sandbox import Tightening
from shared import ids
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import eventually, saw

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]


async def test_stop_by_job_and_by_labels(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    one = await trainer.create(3, job="one")
    two = await trainer.create(3, job="two", labels={"k": "v", "x": "y"})
    three = await trainer.create(3, labels={"k": "w"})
    await trainer.settled(one + two + three)
    assert set(await trainer.operate("stop", [], job="one")) == set(one)
    assert set(await trainer.operate("stop", [], labels={"k": "v"})) == set(two)
    assert set(edge.live) == set(three)
    assert await trainer.operate("stop", [], job="one") == {}


async def test_an_unknown_and_a_foreign_sandbox_are_not_found(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer, stranger = await world.trainer(), await world.trainer("other")
    uids = await trainer.create()
    await trainer.settled(uids)
    unknown = ids.new()
    results = await stranger.operate("stop", [*uids, unknown])
    assert {r.error.code for r in results.values() if r.error} == {"not_found"}
    assert len(results) == 2
    assert await world.states() == {"running": 1, "stopped": 1}  # the stop is remembered


async def test_a_stop_that_overtakes_its_create_wins(world: World) -> None:
    """(L01)"""
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    command = trainer.command(2)
    uid = command.items[0].uid
    results = await trainer.operate("stop", [uid])
    assert results[uid].error is not None
    uids = await trainer.send(command)
    first, second = await trainer.settled(uids)
    assert (first.state, second.state) == ("stopped", "running")
    assert first.error is not None
    assert set(edge.live) == {uids[1]}
    await eventually(lambda: trainer.states_told(uid) == ["stopped"])


async def test_a_repeated_create_is_answered_with_the_present_state(world: World) -> None:
    await world.scheduler(start_again_s=60)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    command = trainer.command(3)
    uids = await trainer.send(command)
    await trainer.settled(uids)
    await trainer.operate("stop", uids[:1])
    trainer.results.clear()
    await trainer.send(command)
    states = [r.state for r in await trainer.settled(uids)]
    assert states == ["stopped", "running", "running"]
    assert len(edge.started) == 3


async def test_a_uid_of_another_project_is_a_conflict(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer, thief = await world.trainer(), await world.trainer("other")
    command = trainer.command()
    uids = await trainer.send(command)
    await trainer.settled(uids)
    await thief.create(request_id=command.request_id)
    (result,) = await thief.settled(uids)
    assert result.error is not None
    assert (result.error.code, result.error.field) == ("conflict", "request_id")
    assert result.node is None
    assert await world.states() == {"running": 1}


@pytest.mark.parametrize(
    "state", ["placed", "starting", "running", "pausing", "paused", "resuming", "stopping"]
)
async def test_stop_works_in_every_state(world: World, state: str) -> None:
    """(L06)"""
    await world.scheduler(op_again_s=60, start_again_s=60)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    edge.on_start = lambda _: {"placed": [], "starting": ["starting"]}.get(state, ["running"])
    uids = await trainer.create()
    silent_in = {"pausing": "pause", "resuming": "resume", "stopping": "stop"}.get(state)
    if state not in ("placed", "starting"):
        await trainer.settled(uids)
    obey = edge.on_op
    edge.on_op = lambda verb, op: [] if verb == silent_in else obey(verb, op)
    for verb in {
        "pausing": ["pause"], "paused": ["pause"], "resuming": ["pause", "resume"],
        "stopping": ["stop"],
    }.get(state, []):  # fmt: skip
        asked = await trainer.op(verb, uids)
        if verb != silent_in:
            await eventually(lambda a=asked: a in trainer.op_replies)

    async def reached() -> bool:
        return await world.states() == {state: 1}

    await eventually(reached)
    if silent_in:  # what the row says is asked for, the edge hears a moment later
        await eventually(lambda: any(verb == silent_in for verb, _ in edge.ops))
    edge.on_op = obey
    if state == "stopping":
        second = await trainer.op("stop", uids)
        generation = edge.ops[-1][1].generation
        await asyncio.sleep(0.3)
        await edge.observe([saw(uids[0], generation, "stopped")])
        results = (await eventually(lambda: trainer.op_replies.get(second))).results
        assert [r.state for r in results] == ["stopped"]
    else:
        results = await trainer.operate("stop", uids)
        assert results[uids[0]].state == "stopped"
    assert await world.committed() == {"n1": 0}


@pytest.mark.parametrize("verb", ["start", "pause", "resume", "stop"])
async def test_a_dropped_answer_is_healed(world: World, verb: str) -> None:
    """(L14)"""
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    dropped: list[str] = []
    start, obey = edge.on_start, edge.on_op

    def drop_first(name: str, found: list[str]) -> list[str]:
        if name == verb and not dropped:
            dropped.append(name)
            return []
        return found

    edge.on_start = lambda item: drop_first("start", start(item))
    edge.on_op = lambda name, op: drop_first(name, obey(name, op))
    uids = await trainer.create()
    assert [r.state for r in await trainer.settled(uids)] == ["running"]
    for name, state in (("pause", "paused"), ("resume", "running"), ("stop", "stopped")):
        assert (await trainer.operate(name, uids))[uids[0]].state == state
    assert dropped == [verb]


async def test_an_operation_outlives_the_scheduler_that_took_it(world: World) -> None:
    first = await world.scheduler(op_again_s=30)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(3)
    await trainer.settled(uids)
    obey = edge.on_op
    edge.on_op = lambda verb, op: [] if verb == "pause" else obey(verb, op)
    asked = await trainer.op("pause", uids)
    ops = await eventually(lambda: len(edge.ops) == 3 and list(edge.ops))
    await first.close()
    world.forget(first)
    await world.scheduler(op_again_s=30)
    await edge.observe([saw(op.uid, op.generation, "paused") for _, op in ops])
    reply = await eventually(lambda: trainer.op_replies.get(asked))
    assert [r.state for r in reply.results] == ["paused"] * 3


async def test_duplicate_and_disordered_observations_change_nothing(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    edge.on_start = lambda _: []
    edge.on_op = lambda *_: []
    trainer = await world.trainer()
    uid = (await trainer.create())[0]
    generation = (await eventually(lambda: edge.started))[0].generation
    for observed in ("running", "starting", "running", "starting"):
        await edge.observe([saw(uid, generation, observed)])
    await trainer.settled([uid])
    await edge.observe([saw(uid, generation - 1, "failed"), saw(uid, generation - 1, "refused")])
    asked = await trainer.op("stop", [uid])
    stop = (await eventually(lambda: edge.ops))[0][1]
    await edge.observe([saw(uid, generation, "running")])  # from before the stop
    await edge.observe([saw(uid, stop.generation, "stopped")] * 3)
    await eventually(lambda: asked in trainer.op_replies)
    await edge.observe([saw(uid, generation, "failed"), saw(uid, generation, "refused")])
    await eventually(lambda: trainer.states_told(uid) == ["running", "stopped"])
    await asyncio.sleep(0.3)
    assert await world.states() == {"stopped": 1}
    assert trainer.states_told(uid) == ["running", "stopped"]
    assert trainer.answers == 1
    assert await world.committed() == {"n1": 0}


async def test_pausing_what_does_not_run_is_a_conflict_for_it_alone(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(2)
    await trainer.settled(uids)
    await trainer.operate("stop", uids[:1])
    results = await trainer.operate("pause", uids)
    assert results[uids[0]].error is not None
    assert results[uids[0]].error.code == "conflict"
    assert (results[uids[1]].state, results[uids[1]].error) == ("paused", None)


async def test_what_is_asked_for_while_its_opposite_is_under_way_is_done_after_it(
    world: World,
) -> None:
    """(L11) For jobs and lists too: their order is the node's."""
    await world.scheduler(op_again_s=30)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create()
    await trainer.settled(uids)
    obey = edge.on_op
    edge.on_op = lambda verb, op: []
    await trainer.op("pause", uids)

    async def is_pausing() -> bool:
        return await world.states() == {"pausing": 1}

    await eventually(is_pausing)
    await eventually(lambda: edge.ops)
    edge.on_op = obey
    results = await trainer.operate("resume", uids)
    assert (results[uids[0]].state, results[uids[0]].error) == ("running", None)


async def test_set_timeout_reaches_the_edge(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create()
    await trainer.settled(uids)
    results = await trainer.operate("set_timeout", uids, ttl_running_stop=7.0, deadline_s=9.0)
    assert results[uids[0]].state == "running"
    verb, op = (await eventually(lambda: edge.ops))[0]
    assert (verb, op.ttl_running_stop, op.deadline_s) == ("set_timeout", 7.0, 9.0)


async def test_a_tightening_reaches_the_edge_of_what_lives_somewhere(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(2)
    await trainer.settled(uids)
    await trainer.operate("stop", uids[:1])
    wanted = Tightening(network=["*"], deny=["ptrace"])
    results = await trainer.operate("tighten", uids, tighten=wanted)
    over, lives = results[uids[0]], results[uids[1]]
    assert over.error is not None and over.error.code == "conflict"
    assert (lives.state, lives.error) == ("running", None)
    found = await eventually(lambda: [op for verb, op in edge.ops if verb == "tighten"])
    assert [(op.uid, op.tighten) for op in found] == [(uids[1], wanted)]


async def test_a_pause_of_what_its_client_resumed_at_the_node_just_now_counts(
    world: World,
) -> None:
    """The row is older than what the node did; what the node tells of it comes late."""
    await world.scheduler(op_again_s=60)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    (uid,) = uids = await trainer.create(job="j")
    await trainer.settled(uids)
    for verb, other, told in (("pause", "running", "resumed"), ("resume", "paused", "paused")):
        state = {"pause": "paused", "resume": "running"}[verb]
        assert (await trainer.operate(verb, uids))[uid].state == state
        generation = edge.ops[-1][1].generation
        edge.live[uid] = other
        assert (await trainer.operate(verb, [], job="j"))[uid].state == state
        await eventually(lambda s=state: edge.live[uid] == s)
        await edge.observe([saw(uid, generation, told)])
        asked = len(edge.ops)
        assert (await trainer.operate(verb, uids))[uid].state == state
        await eventually(lambda n=asked: len(edge.ops) == n + 1)
    assert await world.states() == {"running": 1}
