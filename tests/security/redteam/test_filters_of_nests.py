"""Commands have the filter of the process that makes them: all do, whatever became of it."""

from __future__ import annotations

import asyncio

import pytest

from services.edge.drivers.base import Handle, Resize
from tests.conformance.harness import HANG_S, run
from tests.security.redteam.conftest import Field

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.docker]

DENIES = {"processes": {"deny": ["ptrace"]}}
MORE_THAN_NESTS = 12


def listeners(field: Field, handle: Handle) -> set[int]:
    asking = field.driver._enforcing._held[handle.uid].asking
    return set(asking._listeners) if asking is not None else set()


async def test_commands_one_after_the_other_share_a_listener(field: Field) -> None:
    handle = await field.start(DENIES)
    assert await field.attempt(handle, "traceme") == "EPERM"
    await field.when_told(handle, "seccomp")
    before = listeners(field, handle)
    for _ in range(MORE_THAN_NESTS):
        assert await field.attempt(handle, "traceme") == "EPERM"
    await field.when_told(handle, "seccomp", 1 + MORE_THAN_NESTS)
    assert before and before <= listeners(field, handle)


async def test_more_commands_at_once_than_nests_are_all_filtered_and_told(field: Field) -> None:
    handle = await field.start(DENIES)
    said = await asyncio.gather(*(field.attempt(handle, "traceme") for _ in range(MORE_THAN_NESTS)))
    assert said == ["EPERM"] * MORE_THAN_NESTS
    told = await field.when_told(handle, "seccomp", MORE_THAN_NESTS)
    assert sum(v.count for v in told) == MORE_THAN_NESTS


async def test_commands_are_filtered_after_everything_was_killed(field: Field) -> None:
    handle = await field.start(DENIES)
    for n in range(1, 6):
        await run(field.driver, handle, "kill -9 -1; exit 0", timeout_s=HANG_S)
        assert await field.attempt(handle, "traceme") == "EPERM"
        await field.when_told(handle, "seccomp", n)


async def test_what_stays_behind_keeps_its_filter_under_another_policy(field: Field) -> None:
    spec = field.spec(DENIES)
    handle = await field.begin(spec)
    await field.sh(
        handle,
        "(until [ -e /tmp/go ]; do sleep 0.02; done; /attempt traceme >/tmp/said; >/tmp/done) "
        ">/dev/null 2>&1 &",
    )
    await field.driver.set_policy(handle, field.spec({}, uid=spec.uid))
    assert await field.attempt(handle, "traceme") == "ok"
    said = await field.sh(
        handle, ">/tmp/go; until [ -e /tmp/done ]; do sleep 0.02; done; cat /tmp/said"
    )
    assert said == "EPERM"
    assert sum(v.count for v in await field.when_told(handle, "seccomp")) == 1


async def test_a_change_reaches_all_commands_after_it_while_others_run(field: Field) -> None:
    spec = field.spec({})
    handle = await field.begin(spec)
    stricter = field.spec(DENIES, uid=spec.uid)

    async def said(count: int) -> list[str]:
        return await asyncio.gather(*(field.attempt(handle, "traceme") for _ in range(count)))

    for n in range(5):
        waits = f"until [ -e /tmp/go{n} ]; do sleep 0.02; done"
        running = [asyncio.ensure_future(field.sh(handle, waits)) for _ in range(2)]
        await field.driver.set_policy(handle, stricter)
        assert await said(4) == ["EPERM"] * 4
        await field.driver.set_policy(handle, spec)
        assert await said(4) == ["ok"] * 4
        await field.sh(handle, f">/tmp/go{n}")
        await asyncio.gather(*running)


async def test_an_edge_that_comes_back_is_told(field: Field) -> None:
    spec = field.spec(DENIES)
    handle = await field.begin(spec)
    assert await field.attempt(handle, "traceme") == "EPERM"
    await field.when_told(handle, "seccomp")
    field.edge_dies(handle)
    assert await field.attempt(handle, "traceme") != "ok"
    handle = await field.edge_returns(handle, spec)
    assert await field.attempt(handle, "traceme") == "EPERM"
    assert sum(v.count for v in await field.when_told(handle, "seccomp", 2)) == 2


async def test_a_terminal_is_its_commands_where_taking_one_is_denied(field: Field) -> None:
    handle = await field.start({"processes": {"deny": ["ioctl:0x540e"]}})
    ran = await run(
        field.driver, handle, "echo hello >/dev/tty", pty=Resize(24, 80), timeout_s=HANG_S
    )
    assert (ran.code, ran.stdout) == (0, b"hello\r\n")
    assert field.of(handle) == []
