"""A sandbox's life on a node, told over a real bus."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from schemas.exec import ExecRequest, InfoRequest
from schemas.subjects import cmd
from shared import ids
from tests.integration.edge.cluster import NODE, Cluster, cluster, until


async def test_a_sandbox_starts_runs_a_command_and_stops(system: Cluster) -> None:
    uid = await system.running(env={"A": "1"})
    assert system.edge.sandboxes == {uid}
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), shell="echo $A; exit 3"))
    assert (reply.exit_code, reply.stdout, reply.error) == (3, b"1\n", None)
    await system.scheduler.op("stop", uid)
    stopped = await system.scheduler.observed(uid, "stopped")
    assert (stopped.generation, stopped.cause) == (2, "completed")
    assert system.edge.sandboxes == set()
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert reply.error is not None and reply.error.code == "not_found"


async def test_a_batch_with_a_bad_one_starts_the_others(system: Cluster) -> None:
    good, bad = [ids.new() for _ in range(20)], ids.new()
    await system.scheduler.start(good)
    await system.scheduler.start([bad], backend="vm")
    for uid in good:
        await system.scheduler.observed(uid, "running")
    refused = await system.scheduler.observed(bad, "refused")
    assert refused.error is not None and refused.error.field == "backend"
    assert system.edge.sandboxes == set(good)


async def test_a_repeated_delivery_makes_no_second_sandbox(system: Cluster) -> None:
    uid = ids.new()
    for _ in range(5):
        await system.scheduler.start([uid])
    await system.scheduler.observed(uid, "running")
    marker = ExecRequest(op_id=ids.new(), shell="count /ran")
    assert (await system.caller.exec(uid, marker)).exit_code == 0
    told = system.scheduler.seen(uid).count("running")
    await system.scheduler.start([uid])  # what is true is told again
    await until(lambda: system.scheduler.seen(uid).count("running") > told)
    look = ExecRequest(op_id=ids.new(), shell="cat /ran")
    assert (await system.caller.exec(uid, look)).stdout == b"ran\n"
    assert set(system.scheduler.seen(uid)) == {"running"}


async def test_a_start_that_comes_after_its_stop_is_refused(system: Cluster) -> None:
    uid = ids.new()
    await system.scheduler.op("stop", uid, generation=2)
    await system.scheduler.observed(uid, "unknown")
    await system.scheduler.start([uid], generation=1)
    await until(lambda: len(system.scheduler.seen(uid)) >= 2)
    assert system.scheduler.seen(uid) == ["unknown", "unknown"]
    assert system.edge.sandboxes == set()


async def test_an_ended_sandbox_is_not_started_again(system: Cluster) -> None:
    uid = await system.running(options={"die_after_s": 0.1, "die_cause": "oom"})
    failed = await system.scheduler.observed(uid, "failed")
    assert failed.cause == "oom"
    await system.scheduler.start([uid])
    await until(lambda: system.scheduler.seen(uid).count("failed") >= 2)
    assert system.edge.sandboxes == set()
    assert system.scheduler.last(uid).cause == "oom"


async def test_a_start_that_hangs_can_be_stopped(system: Cluster) -> None:
    """(L06)"""
    uid, other = ids.new(), ids.new()
    await system.scheduler.start([uid], options={"start_hang": True})
    await system.scheduler.observed(uid, "starting")
    await system.scheduler.op("stop", uid)
    await system.scheduler.observed(uid, "stopped")
    await system.scheduler.start([other])
    await system.scheduler.observed(other, "running")
    assert system.edge.sandboxes == {other}


async def test_a_stop_that_hangs_disturbs_nobody_and_is_tried_again(system: Cluster) -> None:
    """(L27)"""
    uid, other = await system.running(options={"stop_hang": 5}), await system.running()
    await system.scheduler.op("stop", uid)
    reply = await system.caller.exec(other, ExecRequest(op_id=ids.new(), argv=["true"]))
    assert reply.exit_code == 0
    assert system.scheduler.seen(uid) == ["running"]  # nothing is called gone that is there
    await system.scheduler.observed(uid, "stopped")
    assert system.edge.sandboxes == {other}


async def test_a_driver_deaf_to_cancellation_leaves_nothing(system: Cluster) -> None:
    uid = ids.new()
    await system.scheduler.start([uid], options={"start_deaf_s": 1.5})
    await system.scheduler.observed(uid, "starting")
    await system.scheduler.op("stop", uid)
    await system.scheduler.observed(uid, "stopped")
    assert system.edge.sandboxes == set()


async def test_a_stop_at_any_moment_of_a_start_leaves_nothing(system: Cluster) -> None:
    """(L02)"""
    uids = [ids.new() for _ in range(40)]

    async def start_and_stop(uid: str, after_s: float) -> None:
        await system.scheduler.start([uid], options={"start_delay_s": 0.02})
        await asyncio.sleep(after_s)
        await system.scheduler.op("stop", uid)

    await asyncio.gather(*(start_and_stop(uid, n * 0.002) for n, uid in enumerate(uids)))
    for uid in uids:
        await system.scheduler.observed(uid, "stopped")
    assert system.edge.sandboxes == set()
    await until(lambda: system.scheduler.beats[-1].committed.sandboxes == 0)


async def test_a_full_node_refuses_and_names_the_limit(tmp_path: Path) -> None:
    """(B11)"""
    env = {
        "DSEC_CAPACITY_SANDBOXES": "8", "DSEC_CAPACITY_MEMORY_MB": "100",
        "DSEC_CAPACITY_CORES": "1", "DSEC_OVERCOMMIT_MEMORY": "2", "DSEC_OVERCOMMIT_CPU": "2",
    }  # fmt: skip
    async with cluster(tmp_path, **env) as system:
        uids = [ids.new() for _ in range(12)]
        await system.scheduler.start(uids)
        await until(lambda: sum(len(system.scheduler.seen(u)) for u in uids) == 12)
        ends = [system.scheduler.last(u) for u in uids]
        assert sorted(o.observed for o in ends) == ["refused"] * 4 + ["running"] * 8
        assert {o.error.field for o in ends if o.error} == {"sandboxes"}
        for uid in uids:
            await system.scheduler.op("stop", uid)
        await until(lambda: not system.edge.sandboxes)
        for field, spec in (
            ("memory_limit_mb", {"memory_limit_mb": 150}),
            ("cpu_cores_limit", {"cpu_cores_limit": 1.5}),
        ):
            first, second = ids.new(), ids.new()
            await system.scheduler.start([first, second], **spec)
            await system.scheduler.observed(first, "running")
            refused = await system.scheduler.observed(second, "refused")
            assert refused.error is not None and refused.error.field == field
            assert refused.error.retryable
            await system.scheduler.op("stop", first)
            await system.scheduler.observed(first, "stopped")


async def test_a_start_has_a_deadline(system: Cluster) -> None:
    uid, late = ids.new(), ids.new()
    await system.scheduler.start([uid], options={"start_hang": True}, expires_s=0.8)
    await system.scheduler.start([late], expires_s=-1.0)
    for each in (uid, late):
        failed = await system.scheduler.observed(each, "failed")
        assert failed.cause == "start_timeout"
        assert failed.error is not None and failed.error.code == "deadline_exceeded"
    assert system.edge.sandboxes == set()


async def test_failed_starts_carry_their_cause_and_free_what_they_held(system: Cluster) -> None:
    """(L07)"""
    uids = {cause: ids.new() for cause in ("runtime", "image")}
    for cause, uid in uids.items():
        await system.scheduler.start([uid], options={"start_error": cause}, memory_limit_mb=512)
    for cause, uid in uids.items():
        assert (await system.scheduler.observed(uid, "failed")).cause == cause
    seen = len(system.scheduler.beats)
    await until(lambda: len(system.scheduler.beats) > seen + 1)
    assert system.scheduler.beats[-1].committed.memory_mb == 0


async def test_a_full_backend_refuses_so_that_another_node_may_try(system: Cluster) -> None:
    uid = ids.new()
    await system.scheduler.start([uid], options={"start_error": "capacity_exhausted"})
    await system.scheduler.observed(uid, "refused")
    await system.scheduler.start([uid], generation=3)  # placed here again later
    await system.scheduler.observed(uid, "running")


async def test_a_missing_layer_is_the_images_fault(system: Cluster) -> None:
    from schemas.sandbox import EdgeStart, LayerRef, ResolvedSpec, SandboxSpec, StartItem

    uid = ids.new()
    item = StartItem(uid=uid, project="team", generation=1, spec=0, expires_at=time.time() + 300)
    resolved = ResolvedSpec(
        spec=SandboxSpec(backend="fake"), layers=[LayerRef(digest="sha256-0000")]
    )
    await system.scheduler.send("start", EdgeStart(specs=[resolved], starts=[item]))
    failed = await system.scheduler.observed(uid, "failed")
    assert failed.cause == "image"


async def test_pause_resume_and_a_command_that_wakes(system: Cluster) -> None:
    uid = await system.running()
    await system.scheduler.op("pause", uid, generation=2)
    assert (await system.scheduler.observed(uid, "paused")).generation == 2
    await system.scheduler.op("resume", uid, generation=3)
    assert (await system.scheduler.observed(uid, "resumed")).generation == 3
    await system.scheduler.op("pause", uid, generation=4)
    await until(lambda: system.scheduler.last(uid).observed == "paused")
    replies = await asyncio.gather(
        *(system.caller.exec(uid, ExecRequest(op_id=ids.new(), shell="echo up")) for _ in range(20))
    )
    assert {r.stdout for r in replies} == {b"up\n"}
    await until(lambda: system.scheduler.last(uid).observed == "resumed")
    assert system.scheduler.seen(uid).count("resumed") == 2  # once, however many ask


async def test_idle_time_and_deadline_end_a_sandbox(system: Cluster) -> None:
    idle = await system.running(ttl_running_stop=2.0)
    dated = await system.running(deadline_s=2.5)
    kept = await system.running()
    sleep = ExecRequest(op_id=ids.new(), shell="count /ran; sleep 4")
    running = asyncio.ensure_future(system.caller.exec(kept, sleep))
    await system.caller.marked(kept)
    await system.scheduler.op("set_timeout", kept, ttl_running_stop=2.0)
    assert (await system.scheduler.observed(idle, "stopped")).cause == "idle_timeout"
    assert (await system.scheduler.observed(dated, "stopped")).cause == "deadline"
    assert (await running).exit_code == 0  # a running command is activity
    assert (await system.scheduler.observed(kept, "stopped")).cause == "idle_timeout"


async def test_set_timeout_changes_and_removes_limits(system: Cluster) -> None:
    uid = await system.running(ttl_running_stop=5.0)
    await system.scheduler.op("set_timeout", uid, ttl_running_stop=0.0, deadline_s=12.0)
    await asyncio.sleep(5.4)
    info = await system.caller.info(uid, InfoRequest(op_id=ids.new()))
    assert info.state == "running"
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_idle_time_pauses_where_that_is_asked(system: Cluster) -> None:
    uid = await system.running(ttl_running_stop=0.4, on_timeout="pause")
    assert (await system.scheduler.observed(uid, "paused")).cause == "idle_timeout"
    info = await system.caller.info(uid, InfoRequest(op_id=ids.new()))
    assert (info.state, info.time_up) == ("paused", "idle_timeout")
    await asyncio.sleep(0.6)
    script = "sleep 1; echo awake"
    reply = await system.caller.exec(uid, ExecRequest(op_id=ids.new(), shell=script))
    assert reply.exit_code == 0
    assert (await system.scheduler.observed(uid, "resumed")).cause is None


async def test_what_cannot_be_enforced_is_refused(system: Cluster) -> None:
    cases: dict[str, dict[str, Any]] = {
        "policy.files.hidden": {"policy": {"files": {"hidden": ["/opt/answers"]}}},
        "policy.require": {"require": ["files.hidden"]},
        "require": {"require": ["display"]},
    }
    for field, spec in cases.items():
        uid = ids.new()
        await system.scheduler.start([uid], **spec)
        failed = await system.scheduler.observed(uid, "failed")
        assert failed.error is not None and failed.error.field == field
    assert system.edge.sandboxes == set()


async def test_a_message_that_cannot_be_read_stops_nothing(system: Cluster) -> None:
    js = system.scheduler.bus.js
    for body in (b"not json", b'{"v":9,"specs":[],"starts":[]}', b'{"specs":3}'):
        await js.publish(cmd("edge", "start", NODE), body)
    uid = await system.running()
    assert system.edge.sandboxes == {uid}


async def test_the_scheduler_may_have_a_sandbox_forgotten(system: Cluster) -> None:
    uid = await system.running()
    system.scheduler.forget = [uid]
    await system.edge.kill()
    await system.edge.start()
    await system.scheduler.observed(uid, "stopped")
    assert system.edge.sandboxes == set()


async def test_heartbeats_say_what_is_there(system: Cluster) -> None:
    uid = await system.running(memory_limit_mb=256, cpu_cores_limit=0.5)
    beat = await until(
        lambda: next((b for b in system.scheduler.beats if b.committed.sandboxes), None)
    )
    assert (beat.committed.memory_mb, beat.committed.cores) == (256, 0.5)
    assert beat.counts == {"fake": {"team": 1}}
    assert beat.backends["fake"].supported and beat.admitting
    assert beat.capacity.memory_mb > 0 and beat.used.sandboxes == 1
    await system.scheduler.op("stop", uid)
    await until(lambda: system.scheduler.beats[-1].committed.sandboxes == 0)
    numbers = [b.seq for b in system.scheduler.beats]
    assert numbers == sorted(set(numbers))
