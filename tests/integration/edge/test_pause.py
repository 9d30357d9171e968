"""Pause, idleness and deadlines through a real edge process and a real bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from schemas.base import decode
from schemas.control import StandingReply, StandingRequest
from schemas.exec import ExecReply, ExecRequest, FileRequest, InfoRequest
from shared import ids
from tests.integration.edge.cluster import WAIT_S, Cluster, cluster, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One for all: each test has sandboxes of its own."""
    async with cluster(tmp_path_factory.mktemp("pause")) as made:
        yield made


def shell(text: str, **more: object) -> ExecRequest:
    return ExecRequest(op_id=ids.new(), shell=text, **more)  # type: ignore[arg-type]


async def exec_(system: Cluster, uid: str, text: str, **more: object) -> ExecReply:
    return await system.caller.exec(uid, shell(text, **more))


async def state(system: Cluster, uid: str) -> str:
    return (await system.caller.info(uid, InfoRequest(op_id=ids.new()))).state


async def in_state(system: Cluster, uid: str, wanted: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while await state(system, uid) != wanted:
            await asyncio.sleep(0.05)


async def paused(system: Cluster, uid: str, *, generation: int = 2) -> None:
    await system.scheduler.op("pause", uid, generation=generation)
    await until(lambda: system.scheduler.last(uid).observed == "paused")


async def restart(system: Cluster) -> None:
    joins = len(system.scheduler.joins)
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) > joins)


async def test_a_failed_resume_is_no_end_and_may_be_repeated(system: Cluster) -> None:
    """(L12)"""
    uid = await system.running(options={"resume_error": 2})
    await paused(system, uid)
    reply = await exec_(system, uid, "echo up")
    assert reply.error is not None and reply.error.code == "unavailable"
    assert await state(system, uid) == "paused"
    await system.scheduler.op("resume", uid, generation=3)
    failed = await until(
        lambda: system.scheduler.last(uid).generation == 3 and system.scheduler.last(uid)
    )
    assert failed.observed == "paused" and failed.error.code == "unavailable"
    assert (await exec_(system, uid, "echo up")).stdout == b"up\n"
    other = await system.running(options={"resume_error": 1})
    await paused(system, other)
    await exec_(system, other, "true")
    await system.scheduler.op("stop", other, generation=9)
    await system.scheduler.observed(other, "stopped")


async def test_what_is_told_of_an_operation_is_of_its_command(system: Cluster) -> None:
    """Else a pause that ends when a resume was asked for already would seem to be that."""
    uid = await system.running()
    await system.scheduler.op("pause", uid, generation=2)
    await system.scheduler.op("resume", uid, generation=3)
    await until(lambda: system.scheduler.last(uid).generation == 3)
    told = [(o.observed, o.generation) for o in system.scheduler.observations if o.uid == uid]
    assert told[-2:] == [("paused", 2), ("resumed", 3)]


async def test_a_failed_pause_leaves_it_running(system: Cluster) -> None:
    uid = await system.running(options={"pause_error": 1})
    await system.scheduler.op("pause", uid, generation=2)
    seen = await until(
        lambda: system.scheduler.last(uid).generation == 2 and system.scheduler.last(uid)
    )
    assert seen.observed == "resumed" and seen.error.code == "unavailable"
    assert (await exec_(system, uid, "echo on")).stdout == b"on\n"


async def stand(system: Cluster, uid: str, verb: str) -> StandingReply:
    answer = await system.caller.call(uid, verb, StandingRequest(op_id=ids.new()))
    return decode(await asyncio.wait_for(answer.final, WAIT_S), StandingReply)


async def test_a_client_pauses_and_resumes_at_the_node(system: Cluster) -> None:
    uid = await system.running()
    for _ in range(20):
        assert (await stand(system, uid, "pause")).state == "paused"
        assert await state(system, uid) == "paused"
        assert (await stand(system, uid, "pause")).state == "paused"
        assert (await stand(system, uid, "resume")).state == "running"
        assert await state(system, uid) == "running"
    await until(lambda: system.scheduler.seen(uid).count("resumed") == 20)
    seen = [s for s in system.scheduler.seen(uid) if s in ("paused", "resumed")]
    assert seen == ["paused", "resumed"] * 20
    assert (await exec_(system, uid, "echo on")).stdout == b"on\n"


async def test_what_a_client_asked_for_at_the_node_outlives_the_edge(system: Cluster) -> None:
    """(L14)"""
    still, going = await system.running(), await system.running()
    for uid in (still, going):
        assert (await stand(system, uid, "pause")).state == "paused"
    assert (await stand(system, going, "resume")).state == "running"
    await restart(system)  # by a kill, right after the answers
    await until_standing(system, still)
    await until_standing(system, going)
    assert (await state(system, still), await state(system, going)) == ("paused", "running")


async def until_standing(system: Cluster, uid: str) -> None:
    while await state(system, uid) not in ("running", "paused"):
        await asyncio.sleep(0.05)


async def test_a_pause_at_the_node_that_fails_says_why_and_changes_nothing(
    system: Cluster,
) -> None:
    uid = await system.running(options={"pause_error": 1, "resume_error": 1})
    failed = await stand(system, uid, "pause")
    assert failed.failure is not None and failed.failure.code == "unavailable"
    assert (failed.state, failed.error) == ("running", None)
    assert (await stand(system, uid, "pause")).failure is None
    failed = await stand(system, uid, "resume")
    assert failed.failure is not None and failed.state == "paused"
    assert (await stand(system, uid, "resume")).state == "running"
    gone = await stand(system, ids.new(), "pause")
    assert gone.error is not None and gone.error.code == "not_found"


async def test_many_clients_share_one_pause_whose_end_all_hear(system: Cluster) -> None:
    uid = await system.running()
    replies = await asyncio.gather(*(stand(system, uid, "pause") for _ in range(20)))
    assert {r.state for r in replies} == {"paused"}
    mixed = await asyncio.gather(
        *(stand(system, uid, verb) for verb in ("resume", "pause", "resume") for _ in range(10))
    )
    assert all(r.failure is None and r.error is None for r in mixed)
    assert (await exec_(system, uid, "echo on")).stdout == b"on\n"


async def test_a_stop_answers_who_asked_for_a_pause(system: Cluster) -> None:
    uid = await system.running(options={"pause_hang": 1})
    asked = asyncio.ensure_future(stand(system, uid, "pause"))
    while await state(system, uid) != "pausing":
        await asyncio.sleep(0.02)
    await system.scheduler.op("stop", uid, generation=3)
    reply = await asked
    assert reply.error is not None and reply.error.code in ("sandbox_died", "not_found")


async def test_memory_that_cannot_be_given_back_lets_it_go_on(system: Cluster) -> None:
    uid = await system.running(options={"reclaim_error": 1})
    await system.scheduler.op("pause", uid, generation=2)
    seen = await system.scheduler.observed(uid, "resumed")
    assert seen.error is not None and "reclaim" in seen.error.message
    assert await state(system, uid) == "running"


async def test_a_pause_that_hangs_holds_no_stop_up(system: Cluster) -> None:
    """(L06, L27)"""
    uid, other = await system.running(options={"pause_hang": 1}), await system.running()
    await system.scheduler.op("pause", uid, generation=2)
    await in_state(system, uid, "pausing")
    assert (await exec_(system, other, "echo on")).stdout == b"on\n"
    await system.scheduler.op("stop", uid, generation=3)
    await system.scheduler.observed(uid, "stopped")


async def test_an_edge_killed_while_pausing_or_resuming_finishes_it(system: Cluster) -> None:
    """(L14, L15)"""
    pausing = await system.running(options={"pause_hang": 1})
    resuming = await system.running(options={"resume_hang": 1})
    await paused(system, resuming)
    await system.scheduler.op("pause", pausing, generation=2)
    await system.scheduler.op("resume", resuming, generation=3)
    await in_state(system, pausing, "pausing")
    await in_state(system, resuming, "resuming")
    await restart(system)
    await until(lambda: system.scheduler.last(pausing).observed == "paused")
    assert system.scheduler.last(pausing).generation == 2
    await until(lambda: system.scheduler.last(resuming).observed == "resumed")
    assert (await exec_(system, pausing, "echo on")).stdout == b"on\n"
    assert (await exec_(system, resuming, "echo on")).stdout == b"on\n"


async def test_a_command_that_is_followed_again_does_not_resume(system: Cluster) -> None:
    uid = await system.running()
    request = shell("echo on; sleep 5; echo done", stream=True)
    first = await system.caller.call(uid, "exec", request)
    await until(lambda: first.frames)
    await paused(system, uid)
    again = await system.caller.call(uid, "exec", request)
    await asyncio.sleep(5.3)
    assert await state(system, uid) == "paused" and not again.final.done()
    await system.scheduler.op("resume", uid, generation=3)
    await asyncio.wait_for(again.final, WAIT_S)


async def test_a_signal_to_a_command_resumes(system: Cluster) -> None:
    uid = await system.running()
    request = shell("echo on; sleep 100", stream=True)
    answer = await system.caller.call(uid, "exec", request)
    await until(lambda: answer.data() == b"on\n")
    await paused(system, uid)
    await system.caller.io(uid, request.op_id, "s", b"TERM")
    await system.scheduler.observed(uid, "resumed")
    await asyncio.wait_for(answer.final, WAIT_S)


async def test_a_client_is_told_that_its_command_stands_still(system: Cluster) -> None:
    uid = await system.running()
    answer = await system.caller.call(uid, "exec", shell("echo on; sleep 600", stream=True))
    await until(lambda: answer.data() == b"on\n")
    await paused(system, uid)
    told = await until(lambda: [d for kind, d, _ in answer.frames if kind == "k" and d])
    assert told[0].endswith(b" p") and 0 <= float(told[0][:-2]) < WAIT_S
    await asyncio.sleep(0.3)
    await system.scheduler.op("resume", uid, generation=3)
    told = await until(
        lambda: [d for kind, d, _ in answer.frames if kind == "k" and d[-1:].isdigit()][-1:]
    )
    assert float(told[0]) > 0.1


async def test_idle_time_does_not_count_paused_time(system: Cluster) -> None:
    uid = await system.running(ttl_running_stop=5.0)
    await paused(system, uid)
    await asyncio.sleep(5.3)
    assert await state(system, uid) == "paused"
    await system.scheduler.op("resume", uid, generation=3)
    await system.scheduler.observed(uid, "resumed")
    assert await state(system, uid) == "running"
    assert (await system.scheduler.observed(uid, "stopped")).cause == "idle_timeout"


async def test_a_deadline_ends_a_paused_sandbox(system: Cluster) -> None:
    uid = await system.running()
    await paused(system, uid)
    await system.scheduler.op("set_timeout", uid, deadline_s=1.0)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_what_happens_on_timeout_is_the_sandboxes_own(system: Cluster) -> None:
    """(L10)"""
    uid = await system.running(ttl_running_stop=0.5, on_timeout="pause")
    for round_ in (1, 2, 3):
        await until(lambda: system.scheduler.last(uid).observed == "paused")
        assert (await exec_(system, uid, "echo on")).stdout == b"on\n"
        await until(lambda n=round_: system.scheduler.seen(uid).count("resumed") == n)
    await until(lambda: system.scheduler.last(uid).observed == "paused")
    assert "stopped" not in system.scheduler.seen(uid)


async def test_work_that_comes_as_time_is_up_is_done(system: Cluster) -> None:
    """(L19)"""
    uids = [await system.running(ttl_running_stop=0.3, on_timeout="pause") for _ in range(4)]

    async def work(uid: str, number: int) -> None:
        for n in range(8):
            await asyncio.sleep(0.29 + (n + number) % 5 * 0.005)
            assert (await exec_(system, uid, "echo on")).stdout == b"on\n"

    await asyncio.gather(*(work(uid, n) for n, uid in enumerate(uids)))


async def test_a_renewal_counts_from_when_it_came_and_is_kept(system: Cluster) -> None:
    """(L17)"""
    uids = [await system.running(ttl_running_stop=60.0) for _ in range(5)]
    last = {}
    for n in range(5):
        await asyncio.sleep(0.2 + n % 2 * 0.1)
        for uid in uids:
            await system.scheduler.op("set_timeout", uid, ttl_running_stop=2.0)
            last[uid] = time.time()
    for uid in uids:
        ended = await system.scheduler.observed(uid, "stopped")
        assert ended.cause == "idle_timeout" and 1.8 < ended.at - last[uid] < 50
    kept = await system.running(deadline_s=6.0)
    await system.scheduler.op("set_timeout", kept, deadline_s=60.0)
    await until(lambda: system.scheduler.seen(kept).count("running") == 2)
    await restart(system)
    await asyncio.sleep(6.0)
    assert await state(system, kept) == "running"


async def test_a_file_transfer_is_activity(system: Cluster) -> None:
    uid = await system.running()
    request = FileRequest(op_id=ids.new(), path="/f")
    answer = await system.caller.call(uid, "file_write", request)
    await until(lambda: "r" in answer.kinds())
    await system.scheduler.op("set_timeout", uid, ttl_running_stop=2.0)
    await asyncio.sleep(2.5)
    assert await state(system, uid) == "running"
    await system.caller.io(uid, request.op_id, "f")
    await asyncio.wait_for(answer.final, WAIT_S)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "idle_timeout"
