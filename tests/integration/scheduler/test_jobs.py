"""Jobs: leases that run out, stops that no create overtakes, many sandboxes at once."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from msgspec.structs import replace

from schemas.base import ErrorReply, decode, encode
from schemas.job import JobCommand, JobInfo, JobPage, JobQuery, JobReply, JobRequest
from schemas.subjects import cmd, rpc
from services.scheduler import sending
from shared import ids
from tests.integration.scheduler.conftest import World
from tests.integration.scheduler.world import Trainer, eventually, saw

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

QUICK = {"lease_late_s": 0.2}


async def ask(trainer: Trainer, verb: str, job: str, holder: str, **kw: Any) -> Any:
    """Opens or renews as auth would pass it on; the reply or the error."""
    inbox = f"{trainer.inbox}.job.{ids.new()}"
    answers = await trainer.nc.subscribe(inbox)
    await trainer.nc.flush()
    request = JobRequest(request_id=ids.new(), job=job, holder=holder, **kw)
    command = JobCommand(
        project=trainer.project, principal="p", verb=verb, request=request, reply_to=inbox
    )  # type: ignore[arg-type]
    js = trainer.nc.jetstream(timeout=60)
    await js.publish(cmd("job", verb, trainer.project), encode(command))
    message = await answers.next_msg(timeout=60)
    await answers.unsubscribe()
    if b'"error"' in message.data:
        return decode(message.data, ErrorReply).error
    return decode(message.data, JobReply).job


async def job_of(trainer: Trainer, job: str) -> JobInfo:
    query = JobQuery(job=job, project=trainer.project)
    answer = await trainer.nc.request(rpc("scheduler", "jobs"), encode(query), timeout=60)
    (found,) = decode(answer.data, JobPage).jobs
    return found


async def counted(trainer: Trainer, job: str, sandboxes: dict[str, int]) -> None:
    """Waits until the scheduler counts so many of the job's sandboxes by state."""

    async def same() -> bool:
        return (await job_of(trainer, job)).sandboxes == sandboxes

    await eventually(same, what=f"{job}: {sandboxes}")


async def test_a_job_that_nobody_renews_is_paused_as_a_whole(world: World) -> None:
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    me = ids.new()
    opened = await ask(trainer, "open", "run", me, lease_s=1)
    assert (opened.state, opened.epoch) == ("leased", 1)
    mine = await trainer.create(4, job="run")
    other = await trainer.create(1, job="other")
    await trainer.settled(mine + other)
    await counted(trainer, "run", {"paused": 4})
    assert [edge.live[u] for u in mine + other] == ["paused"] * 4 + ["running"]
    assert (await job_of(trainer, "run")).state == "lapsed"
    again = await ask(trainer, "open", "run", ids.new(), lease_s=60)
    assert again.epoch == 2
    await counted(trainer, "run", {"running": 4})
    assert [edge.live[u] for u in mine] == ["running"] * 4


async def test_a_holder_that_was_only_late_finds_its_commands_going_on(world: World) -> None:
    """What the loss paused is resumed by the renewal; what somebody had paused stays so."""
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    me = ids.new()
    await ask(trainer, "open", "late", me, lease_s=60)
    mine = await trainer.create(4, job="late")
    await trainer.settled(mine)
    await trainer.operate("pause", [mine[0]])
    await ask(trainer, "renew", "late", me, lease_s=1)  # the last one
    await counted(trainer, "late", {"paused": 4})

    async def revived() -> bool:
        return (await ask(trainer, "renew", "late", me, lease_s=60)).state == "leased"

    await eventually(revived, what="late is leased again")
    await counted(trainer, "late", {"paused": 1, "running": 3})
    assert [edge.live[u] for u in mine] == ["paused"] + ["running"] * 3


async def test_renewals_keep_a_job_alive(world: World) -> None:
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    me = ids.new()
    await ask(trainer, "open", "run", me, lease_s=8)
    uids = await trainer.create(2, job="run")
    await trainer.settled(uids)
    end = time.monotonic() + 9.0
    while time.monotonic() < end:
        await ask(trainer, "renew", "run", me, lease_s=8)
        await asyncio.sleep(0.2)
    assert [edge.live[u] for u in uids] == ["running"] * 2


async def test_what_comes_up_after_its_job_was_lost_is_paused_too(world: World) -> None:
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    edge.on_start = lambda _: ["starting"]
    trainer = await world.trainer()
    await ask(trainer, "open", "run", ids.new(), lease_s=1)
    (uid,) = await trainer.create(1, job="run")
    await eventually(lambda: edge.started, what="the start")

    async def lapsed() -> bool:
        return (await job_of(trainer, "run")).state == "lapsed"

    await eventually(lapsed, what="the lapse")
    item = edge.started[0]
    edge.live[uid] = "running"
    await edge.observe([saw(uid, item.generation, "running")])
    await eventually(lambda: edge.live[uid] == "paused", what="paused")


async def test_what_somebody_resumed_after_the_loss_is_left_to_him(world: World) -> None:
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    await ask(trainer, "open", "run", ids.new(), lease_s=1)
    uids = await trainer.create(1, job="run")
    await trainer.settled(uids)
    await counted(trainer, "run", {"paused": 1})
    await trainer.operate("resume", uids)
    await asyncio.sleep(1.0)
    assert edge.live[uids[0]] == "running"


async def test_a_lost_job_can_be_stopped_or_kept(world: World) -> None:
    await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    me = ids.new()
    kinds = {"ends": "stop", "stays": "keep"}
    for job, on_lost in kinds.items():
        await ask(trainer, "open", job, me, lease_s=60, on_lost=on_lost)
    ends = await trainer.create(2, job="ends")
    stays = await trainer.create(1, job="stays")
    await trainer.settled(ends + stays)
    for job, on_lost in kinds.items():
        await ask(trainer, "renew", job, me, lease_s=1, on_lost=on_lost)
    await eventually(lambda: set(edge.live) == set(stays), what="the end of one job")
    events = await eventually(
        lambda: [e for e in trainer.events if e.uid in ends and e.state == "stopped"]
    )
    assert {e.cause for e in events} == {"job_lost"}

    async def lapsed() -> bool:
        return (await job_of(trainer, "stays")).state == "lapsed"

    await eventually(lapsed, what="the other one is lost too")
    assert edge.live[stays[0]] == "running"


async def test_another_process_takes_a_job_over_and_the_former_learns_it(world: World) -> None:
    await world.scheduler(**QUICK)
    await world.edge("n1")
    trainer = await world.trainer()
    old, new = ids.new(), ids.new()
    await ask(trainer, "open", "run", old)
    taken = await ask(trainer, "open", "run", new)
    assert (taken.holder, taken.epoch) == (new, 2)
    error = await ask(trainer, "renew", "run", old)
    assert (error.code, error.field) == ("conflict", "holder")


async def test_no_create_overtakes_the_stop_of_its_job(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    now = time.time()
    early = replace(trainer.command(2, job="run"), asked_at=now)
    late = replace(trainer.command(1, job="run"), asked_at=now + 2)
    label = replace(trainer.command(1, job="other"), asked_at=now)
    await trainer.operate("stop", [], job="run", asked_at=now + 1)
    uids = await trainer.send(early, late, label)
    results = await trainer.settled(uids)
    assert [r.state for r in results] == ["rejected", "rejected", "running", "running"]
    assert results[0].error is not None
    assert (results[0].error.code, results[0].error.cause) == ("sandbox_died", "cancelled")
    assert len(edge.live) == 2


async def test_a_stop_leaves_alone_what_was_asked_for_after_it(world: World) -> None:
    await world.scheduler()
    edge = await world.edge("n1")
    trainer = await world.trainer()
    now = time.time()
    early = replace(trainer.command(1, job="run"), asked_at=now)
    late = replace(trainer.command(1, job="run"), asked_at=now + 2)
    before, after = await trainer.send(early, late)
    await trainer.settled([before, after])
    results = await trainer.operate("stop", [], job="run", asked_at=now + 1)
    assert set(results) == {before}
    assert set(edge.live) == {after}


async def test_an_outage_of_the_scheduler_loses_no_job(world: World) -> None:
    first = await world.scheduler(**QUICK)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    me = ids.new()
    await ask(trainer, "open", "run", me, lease_s=60)
    uids = await trainer.create(1, job="run")
    await trainer.settled(uids)
    world.forget(first)
    await first.close()
    await world.sql("update job set lease_until = now() - interval '1 minute'")  # meanwhile
    await world.scheduler(**QUICK)
    await asyncio.sleep(1.0)
    renewed = await ask(trainer, "renew", "run", me, lease_s=60)
    assert (renewed.state, renewed.epoch) == ("leased", 1)
    assert edge.live[uids[0]] == "running"


async def test_two_schedulers_lose_a_job_once(world: World) -> None:
    for _ in range(2):  # neither asks an edge again that is only slow
        await world.scheduler(**QUICK, op_again_s=60.0)
    edge = await world.edge("n1")
    trainer = await world.trainer()
    await ask(trainer, "open", "run", ids.new(), lease_s=1)
    uids = await trainer.create(20, job="run")
    await trainer.settled(uids)
    await eventually(lambda: all(edge.live[u] == "paused" for u in uids), what="paused")
    await asyncio.sleep(0.5)
    assert sorted(op.uid for verb, op in edge.ops if verb == "pause") == sorted(uids)


async def test_many_results_come_in_several_messages(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MAX_RESULTS", 4)
    await world.scheduler()
    await world.edge("n1")
    trainer = await world.trainer()
    uids = await trainer.create(10, job="run")
    await trainer.settled(uids)
    assert set(await trainer.operate("pause", [], job="run")) == set(uids)
    assert set(await trainer.operate("stop", [], job="run")) == set(uids)


async def test_jobs_are_listed_page_by_page_with_their_counts(world: World) -> None:
    await world.scheduler()
    await world.edge("n1")
    trainer, stranger = await world.trainer(), await world.trainer("other")
    for name in ("c", "a", "b"):
        await trainer.settled(await trainer.create(1, job=name))
    await stranger.settled(await stranger.create(1, job="d"))
    found: list[JobInfo] = []
    after = None
    while True:
        query = JobQuery(project="lab", after=after, limit=2)
        answer = await trainer.nc.request(rpc("scheduler", "jobs"), encode(query), timeout=60)
        page = decode(answer.data, JobPage)
        found += page.jobs
        after = page.next
        if after is None:
            break
    assert [(j.job, j.state, j.sandboxes) for j in found] == [
        (name, "free", {"running": 1}) for name in ("a", "b", "c")
    ]
