"""Killing everything that runs in a sandbox, as the port's prose promises it."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Driver, Handle, Pausable
from services.edge.drivers.clearing import Clearing
from tests.conformance.harness import SLEEPERS, run, until
from tests.conformance.test_pause import begun

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def clearing(driver: Driver) -> Clearing:
    assert isinstance(driver, Clearing)
    return driver


async def test_probe_says_whether_it_can_clear(driver: Driver) -> None:
    assert (await driver.probe()).features["clear"].supported == isinstance(driver, Clearing)


async def test_commands_come_to_their_result_and_new_ones_begin_at_once(
    driver: Driver, clearing: Clearing, sandbox: Handle
) -> None:
    for _ in range(3):
        going = [await begun(driver, sandbox, "echo on; sleep 1000") for _ in range(3)]
        await run(driver, sandbox, "echo kept > /tmp/kept")
        await clearing.clear(sandbox)
        assert (await run(driver, sandbox, "cat /tmp/kept")).stdout == b"kept\n"
        for ran in await asyncio.wait_for(asyncio.gather(*going), 60):
            assert (ran.stdout, ran.outcome.signal) == (b"on\n", "KILL")


async def test_what_a_command_left_behind_is_gone(
    driver: Driver, clearing: Clearing, sandbox: Handle
) -> None:
    """Also what left its session, and what forks all the time."""
    leave = (
        "setsid sh -c 'sleep 8; echo late > /tmp/late' >/dev/null 2>&1 & "
        "setsid sh -c 'while :; do (sleep 0.01; :) & wait; done' >/dev/null 2>&1 &"
    )
    await run(driver, sandbox, leave)
    await clearing.clear(sandbox)
    await asyncio.sleep(8.5)
    assert (await run(driver, sandbox, "cat /tmp/late")).code != 0
    left = await run(driver, sandbox, SLEEPERS)
    assert left.stdout == b"0\n"


async def test_a_paused_sandbox_is_cleared_and_stays_paused(
    driver: Driver, clearing: Clearing, sandbox: Handle
) -> None:
    assert isinstance(driver, Pausable)
    going = await begun(driver, sandbox, "echo on; sleep 5; echo off > /tmp/off")
    await driver.pause(sandbox)
    await clearing.clear(sandbox)
    given = asyncio.ensure_future(run(driver, sandbox, "echo new"))
    await asyncio.sleep(0.3)
    assert not given.done()
    await driver.resume(sandbox)
    assert (await asyncio.wait_for(given, 60)).stdout == b"new\n"
    await until(lambda: going.done())
    assert (await run(driver, sandbox, "cat /tmp/off")).code != 0
