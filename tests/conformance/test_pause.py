"""Standing still and going on, as the port's prose promises it."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Driver, Handle, Pausable
from tests.conformance.harness import HANG_S, Harness, Recorder, new_uid, run, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def pausable(driver: Driver) -> Pausable:
    assert isinstance(driver, Pausable)
    return driver


async def begun(driver: Driver, handle: Handle, command: str, **changes: object) -> asyncio.Task:  # type: ignore[type-arg]
    """A command that has written its first line."""
    io = Recorder()
    task = asyncio.ensure_future(run(driver, handle, command, io=io, **changes))
    await asyncio.wait_for(io.started.wait(), HANG_S)
    return task


async def test_probe_says_whether_it_can_pause(driver: Driver) -> None:
    feature = (await driver.probe()).features["pause"]
    assert feature.supported == isinstance(driver, Pausable)


async def test_pause_and_resume_may_be_repeated(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    await pausable.resume(sandbox)
    for _ in range(2):
        await pausable.pause(sandbox)
        await pausable.pause(sandbox)
        assert (await driver.inspect(sandbox)).alive
        await driver.usage(sandbox)
        await pausable.resume(sandbox)
        await pausable.resume(sandbox)
        assert (await run(driver, sandbox, "echo up")).stdout == b"up\n"


async def test_a_command_stands_still_and_goes_on(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    going = await begun(driver, sandbox, "echo on; sleep 5; echo done")
    await pausable.pause(sandbox)
    await asyncio.sleep(5.3)
    assert not going.done()
    await pausable.resume(sandbox)
    ran = await asyncio.wait_for(going, HANG_S)
    assert (ran.stdout, ran.code) == (b"on\ndone\n", 0)


async def test_paused_time_counts_against_no_limit(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    going = await begun(driver, sandbox, "echo on; sleep 3; echo done", timeout_s=6)
    endless = await begun(driver, sandbox, "echo on; sleep 600", timeout_s=6)
    await pausable.pause(sandbox)
    await asyncio.sleep(6.2)
    await pausable.resume(sandbox)
    ran = await asyncio.wait_for(going, HANG_S)
    assert (ran.stdout, ran.outcome.timed_out) == (b"on\ndone\n", False)
    assert (await asyncio.wait_for(endless, HANG_S)).outcome.timed_out


async def test_a_command_given_to_a_paused_sandbox_begins_when_it_goes_on(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    await pausable.pause(sandbox)
    given = asyncio.ensure_future(run(driver, sandbox, "echo begun", timeout_s=HANG_S))
    await asyncio.sleep(0.3)
    assert not given.done()
    await pausable.resume(sandbox)
    assert (await asyncio.wait_for(given, HANG_S)).stdout == b"begun\n"


async def test_a_paused_sandbox_can_be_stopped(harness: Harness) -> None:
    driver = harness.driver
    assert isinstance(driver, Pausable)
    before = harness.leftovers()
    for grace_s in (0.0, 1.0):
        handle = await driver.start(harness.spec(uid=new_uid()))
        await run(driver, handle, "setsid sleep 1000 & echo started")
        await driver.pause(handle)
        async with asyncio.timeout(HANG_S):
            await driver.stop(handle, grace_s=grace_s)
        assert harness.leftovers() <= before
        assert not (await driver.inspect(handle)).alive


async def test_changes_survive_every_pause(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    """(L08)"""
    for i in range(5):
        await run(driver, sandbox, f"echo {i} >/tmp/f{i}")
        await pausable.pause(sandbox)
        await pausable.reclaim(sandbox)
        await pausable.resume(sandbox)
        seen = [(await run(driver, sandbox, f"cat /tmp/f{n}")).stdout for n in range(i + 1)]
        assert seen == [f"{n}\n".encode() for n in range(i + 1)]


async def test_a_cancelled_pause_leaves_it_running(
    driver: Driver, pausable: Pausable, sandbox: Handle
) -> None:
    for delay_s in (0.0, 0.0005, 0.001, 0.002):
        task = asyncio.ensure_future(pausable.pause(sandbox))
        await asyncio.sleep(delay_s)
        task.cancel()
        done = await asyncio.gather(task, return_exceptions=True)
        if done == [None]:
            await pausable.resume(sandbox)
        ran = await asyncio.wait_for(run(driver, sandbox, "echo runs"), HANG_S)
        assert ran.stdout == b"runs\n"


async def test_a_pause_outlives_the_edge(harness: Harness) -> None:
    """(L15)"""
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    await run(harness.driver, handle, "echo kept >/tmp/kept")
    assert isinstance(harness.driver, Pausable)
    await harness.driver.pause(handle)
    fresh = await harness.restart()
    assert isinstance(fresh, Pausable)
    try:
        found = await fresh.recover(handle, spec)
        assert found is not None
        await fresh.pause(found)
        given = asyncio.ensure_future(run(fresh, found, "cat /tmp/kept"))
        await asyncio.sleep(0.2)
        assert not given.done()
        await fresh.resume(found)
        assert (await asyncio.wait_for(given, HANG_S)).stdout == b"kept\n"
    finally:
        await fresh.stop(handle)


async def test_a_sandbox_left_frozen_goes_on_where_it_is_to_run(harness: Harness) -> None:
    """(L15)"""
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    assert isinstance(harness.driver, Pausable)
    await harness.driver.pause(handle)
    fresh = await harness.restart()
    assert isinstance(fresh, Pausable)
    try:
        found = await fresh.recover(handle, spec)
        assert found is not None
        await fresh.resume(found)
        assert (await asyncio.wait_for(run(fresh, found, "echo up"), HANG_S)).stdout == b"up\n"
    finally:
        await fresh.stop(handle)


async def test_sweep_removes_what_was_left_frozen(harness: Harness) -> None:
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    assert isinstance(harness.driver, Pausable)
    await harness.driver.pause(handle)
    fresh = await harness.restart()
    assert spec.uid in await fresh.sweep(frozenset())
    await until(lambda: not [name for name in harness.leftovers() if spec.uid in name])
