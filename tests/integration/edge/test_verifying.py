"""Time for scoring and leases of verifiers, through a real edge process and a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from schemas.base import decode
from schemas.control import LeaseReply, LeaseRequest
from schemas.exec import HEADER_LEASE, ExecReply, ExecRequest, InfoRequest
from shared import ids
from tests.integration.edge.cluster import WAIT_S, Cluster, cluster, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG_S = 300.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """One for all: each test has sandboxes of its own."""
    async with cluster(tmp_path_factory.mktemp("verify")) as made:
        yield made


async def begin(system: Cluster, uid: str, text: str, lease: str = "") -> Any:
    request = ExecRequest(op_id=ids.new(), shell=text)
    headers = {HEADER_LEASE: lease} if lease else None
    return await system.caller.call(uid, "exec", request, headers=headers)


async def reply_of(answer: Any) -> ExecReply:
    return decode(await asyncio.wait_for(answer.final, WAIT_S), ExecReply)


async def exec_(system: Cluster, uid: str, text: str, lease: str = "") -> ExecReply:
    return await reply_of(await begin(system, uid, text, lease))


async def lease_of(
    system: Cluster, uid: str, lease: str, lease_s: float = LONG_S, *, alone: bool = False
) -> LeaseReply:
    request = LeaseRequest(op_id=ids.new(), lease=lease, lease_s=lease_s, alone=alone)
    answer = await system.caller.call(uid, "verify", request)
    return decode(await asyncio.wait_for(answer.final, WAIT_S), LeaseReply)


async def taken(system: Cluster, uid: str, lease_s: float = LONG_S, **more: bool) -> str:
    lease = ids.new()
    reply = await lease_of(system, uid, lease, lease_s, **more)
    assert reply.error is None and 0 < reply.held_s <= lease_s <= reply.left_s
    return lease


async def time_up(system: Cluster, uid: str) -> str | None:
    return (await system.caller.info(uid, InfoRequest(op_id=ids.new()))).time_up


async def scoring(system: Cluster, uid: str) -> str:
    """Which limit was reached, once one is."""
    async with asyncio.timeout(WAIT_S):
        while (cause := await time_up(system, uid)) is None:
            await asyncio.sleep(0.05)
    return cause


async def limited(system: Cluster, uid: str, **limits: float) -> None:
    """From now on; a start with so short a limit might be over before it is used."""
    told = len(system.scheduler.seen(uid))
    await system.scheduler.op("set_timeout", uid, asked_at=1.0, **limits)
    await until(lambda: len(system.scheduler.seen(uid)) > told)


async def restart(system: Cluster) -> None:
    joins = len(system.scheduler.joins)
    await system.edge.kill()
    await system.edge.start()
    await until(lambda: len(system.scheduler.joins) > joins)


async def test_when_time_is_up_the_agent_is_over_and_a_verifier_goes_on(system: Cluster) -> None:
    for cause, limit in (("deadline", "deadline_s"), ("idle_timeout", "ttl_running_stop")):
        uid = await system.running(scoring_grace_s=LONG_S)
        assert (await exec_(system, uid, "echo work > /f; sleep 600 &")).exit_code == 0
        working = await begin(system, uid, "sleep 600") if cause == "deadline" else None
        await limited(system, uid, **{limit: 0.3})
        assert await scoring(system, uid) == cause
        for answer in filter(None, [working, await begin(system, uid, "cat /f")]):
            refused = (await reply_of(answer)).error
            assert refused is not None
            assert (refused.code, refused.cause, refused.is_infra) == (
                "sandbox_died", cause, False
            )  # fmt: skip
        lease = await taken(system, uid)
        assert (await exec_(system, uid, "cat /f", lease)).stdout == b"work\n"
        assert "stopped" not in system.scheduler.seen(uid)
        await system.scheduler.op("stop", uid)
        await system.scheduler.observed(uid, "stopped")


async def test_time_for_scoring_ends_too(system: Cluster) -> None:
    uid = await system.running(scoring_grace_s=1.0, deadline_s=0.5)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_a_deadline_waits_for_a_lease_also_over_a_restart(system: Cluster) -> None:
    uid = await system.running()
    lease = await taken(system, uid)
    await limited(system, uid, deadline_s=0.3)
    await restart(system)
    await asyncio.sleep(1.0)  # the deadline has passed
    assert (await exec_(system, uid, "echo on", lease)).stdout == b"on\n"
    assert (await lease_of(system, uid, lease, 0.0)).error is None
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_a_verifier_that_is_silent_holds_nothing(system: Cluster) -> None:
    uid = await system.running()
    await taken(system, uid, 1.0)
    await limited(system, uid, deadline_s=0.3)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_one_verifier_at_a_time(system: Cluster) -> None:
    uid = await system.running()
    lease = await taken(system, uid)
    refused = (await lease_of(system, uid, ids.new())).error
    assert refused is not None and refused.code == "conflict"
    await lease_of(system, uid, lease, 0.0)
    await taken(system, uid)


async def test_a_paused_sandbox_whose_time_is_up_is_resumed_by_its_verifier(
    system: Cluster,
) -> None:
    uid = await system.running(scoring_grace_s=LONG_S)
    await exec_(system, uid, "echo work > /f")
    await system.scheduler.op("pause", uid)
    await system.scheduler.observed(uid, "paused")
    await limited(system, uid, deadline_s=0.3)
    assert await scoring(system, uid) == "deadline"
    lease = await taken(system, uid)
    assert system.scheduler.seen(uid)[-1] == "paused"  # a lease wakes nothing
    assert (await exec_(system, uid, "cat /f", lease)).stdout == b"work\n"


async def test_an_edge_that_dies_lets_no_agent_back_in(system: Cluster) -> None:
    uid = await system.running(scoring_grace_s=LONG_S, deadline_s=0.5)
    assert await scoring(system, uid) == "deadline"
    lease = await taken(system, uid)
    await restart(system)
    refused = (await exec_(system, uid, "true")).error
    assert refused is not None and refused.code == "sandbox_died"
    assert (await exec_(system, uid, "echo on", lease)).stdout == b"on\n"


async def test_alone_nobody_else_is_let_in_until_the_lease_is_over(system: Cluster) -> None:
    uid = await system.running()
    working = await begin(system, uid, "sleep 600")
    lease = await taken(system, uid)
    assert (await exec_(system, uid, "echo beside")).stdout == b"beside\n"
    assert (await lease_of(system, uid, lease, alone=True)).error is None
    cut = (await reply_of(working)).error
    assert cut is not None and cut.code == "conflict"
    refused = (await exec_(system, uid, "true")).error
    assert refused is not None and refused.code == "conflict"
    assert (await exec_(system, uid, "echo mine", lease)).stdout == b"mine\n"
    await lease_of(system, uid, lease, 0.0)
    assert (await exec_(system, uid, "echo ours")).stdout == b"ours\n"


async def test_a_sandbox_that_cannot_be_cleared_ends(system: Cluster) -> None:
    options = {"clear_error": 9}
    uid = await system.running(scoring_grace_s=LONG_S, deadline_s=0.5, options=options)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"


async def test_a_renewal_that_comes_late_does_not_undo_a_later_one(system: Cluster) -> None:
    """(L17)"""
    uid = await system.running(deadline_s=LONG_S)
    await system.scheduler.op("pause", uid, generation=3)
    await system.scheduler.op("resume", uid, generation=4)
    await system.scheduler.op("set_timeout", uid, generation=4, deadline_s=LONG_S, asked_at=20.0)
    await system.scheduler.op("set_timeout", uid, generation=1, deadline_s=0.1, asked_at=19.0)
    last = await system.running()  # whatever came before it was done
    await asyncio.sleep(0.5)
    assert "stopped" not in system.scheduler.seen(uid)
    # one of an older command counts where nobody asked later
    await system.scheduler.op("set_timeout", uid, generation=1, deadline_s=0.1, asked_at=21.0)
    assert (await system.scheduler.observed(uid, "stopped")).cause == "deadline"
    await system.scheduler.op("stop", last)
