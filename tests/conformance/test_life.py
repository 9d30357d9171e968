"""The life of a sandbox, as the port's prose promises it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.edge.drivers.base import Driver, Handle
from shared import policies
from shared.errors import DsecError, PolicyDenied, Unsupported
from tests.conformance.harness import Harness, new_uid, run, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_probe_reports_exec_as_a_feature(driver: Driver) -> None:
    report = await driver.probe()
    assert report.supported, report.reason
    assert report.features["exec"].supported


async def test_start_returns_a_sandbox_whose_agent_answers(driver: Driver, sandbox: Handle) -> None:
    assert (await driver.inspect(sandbox)).alive
    assert (await run(driver, sandbox, "echo up")).stdout == b"up\n"


async def test_a_handle_is_plain_data(sandbox: Handle) -> None:
    again = msgspec.json.decode(msgspec.json.encode(sandbox), type=Handle)
    assert again == sandbox


async def test_stop_leaves_nothing_and_may_be_repeated(harness: Harness) -> None:
    before = harness.leftovers()
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    await run(harness.driver, handle, "setsid sleep 1000 & echo started")
    await harness.driver.stop(handle)
    assert harness.leftovers() <= before
    await harness.driver.stop(handle)
    assert not (await harness.driver.inspect(handle)).alive


async def test_two_starts_of_one_uid_make_one_sandbox(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    try:
        with pytest.raises(DsecError):
            await harness.driver.start(spec)
        assert (await run(harness.driver, handle, "echo still")).stdout == b"still\n"
    finally:
        await harness.driver.stop(handle)


async def test_a_cancelled_start_leaves_nothing(harness: Harness) -> None:
    before = harness.leftovers()
    for delay_s in (0.0, 0.001, 0.003, 0.006):
        task = asyncio.ensure_future(harness.driver.start(harness.spec(uid=new_uid())))
        await asyncio.sleep(delay_s)
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if isinstance(done[0], Handle):
            await harness.driver.stop(done[0])
    await until(lambda: harness.leftovers() <= before)


async def test_a_limit_without_enforcer_is_refused_before_anything_starts(
    harness: Harness,
) -> None:
    report = await harness.driver.probe()
    if report.features["disk_limit"].supported:
        handle = await harness.driver.start(harness.spec(uid=new_uid(), disk_mb=64))
        assert "disk_mb" in handle.enforcement
        await harness.driver.stop(handle)
        return
    before = harness.leftovers()
    with pytest.raises((Unsupported, PolicyDenied)) as caught:
        await harness.driver.start(harness.spec(uid=new_uid(), disk_mb=64))
    assert caught.value.field == "disk_limit_mb"
    assert harness.leftovers() <= before


async def test_every_denied_network_rule_has_an_enforcer(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid(), policy=policies.read(None, {"*": False}))
    handle = await harness.driver.start(spec)
    try:
        assert handle.enforcement["network"]
    finally:
        await harness.driver.stop(handle)


async def test_a_death_is_reported_once_with_a_cause(harness: Harness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    await harness.crash(handle)
    await until(lambda: any(e.uid == handle.uid for e in harness.exits()))
    inspection = await harness.driver.inspect(handle)
    assert not inspection.alive and inspection.cause
    await harness.driver.stop(handle)
    assert len([e for e in harness.exits() if e.uid == handle.uid]) == 1


async def test_stopping_is_no_death(harness: Harness) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    await harness.driver.stop(handle)
    await asyncio.sleep(0.2)
    assert not [e for e in harness.exits() if e.uid == handle.uid]


async def test_recover_gives_a_new_edge_the_running_sandbox(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    await run(harness.driver, handle, "echo kept >/tmp/kept")
    fresh = await harness.restart()
    try:
        found = await fresh.recover(handle, spec)
        assert found is not None
        assert (await run(fresh, found, "cat /tmp/kept")).stdout == b"kept\n"
    finally:
        await fresh.stop(handle)


async def test_recover_of_a_sandbox_that_is_gone_is_none(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    await harness.driver.stop(handle)
    assert await harness.driver.recover(handle, spec) is None


async def test_sweep_removes_what_no_one_knows(harness: Harness) -> None:
    known, unknown = harness.spec(uid=new_uid()), harness.spec(uid=new_uid())
    kept = await harness.driver.start(known)
    await harness.driver.start(unknown)
    fresh = await harness.restart()
    try:
        assert await fresh.recover(kept, known) is not None
        assert await fresh.sweep(frozenset({known.uid})) == [unknown.uid]
        assert (await run(fresh, kept, "echo alive")).stdout == b"alive\n"
        assert not [name for name in harness.leftovers() if unknown.uid in name]
    finally:
        await fresh.stop(kept)


async def test_sandboxes_are_started_and_stopped_side_by_side(harness: Harness) -> None:
    handles = await asyncio.gather(
        *(harness.driver.start(harness.spec(uid=new_uid())) for _ in range(4))
    )
    ran = await asyncio.gather(*(run(harness.driver, h, "echo $$") for h in handles))
    assert all(r.code == 0 for r in ran)
    await asyncio.gather(*(harness.driver.stop(h) for h in handles))
