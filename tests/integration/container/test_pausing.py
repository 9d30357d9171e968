"""Pausing real containers: freezers, limits, memory given back, swap of the edge's own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from services.edge.machine import freezing, pageout, reclaim, swapspace
from services.edge.machine.cgroups import WORK, CgroupDriver, Groups, Kind
from shared.errors import InvalidRequest, Unavailable
from tests.conformance.harness import HANG_S, Recorder, new_uid, run, until
from tests.integration.container.harness import ContainerHarness, container_harness

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEEP = 'v=$(head -c 6000000 /dev/urandom | base64); echo "$v" | md5sum'
SEE = 'echo "$v" | md5sum'
SWAP_MB = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContainerHarness]:
    """With zram of its own, where this machine lets it make some."""
    folder = tmp_path_factory.mktemp("pausing")
    async with container_harness(folder, swap="zram", swap_mb=SWAP_MB) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def large(harness: ContainerHarness) -> AsyncIterator[Handle]:
    handle = await harness.driver.start(harness.spec(uid=new_uid(), memory_mb=256))
    yield handle
    await harness.driver.stop(handle)


def groups_of(handle: Handle) -> Groups:
    return Groups.of(handle.data["groups"])


def settings_of(handle: Handle) -> dict[str, str]:
    """Everything of the workload's groups that limits it."""
    groups = groups_of(handle)
    found = {}
    for folder in {*groups.v1.values(), str(groups.v2)}:
        for file in sorted(Path(folder, WORK).iterdir()):
            limits = ("limit_in_bytes", "swappiness", ".max", "shares", "quota_us", "weight")
            if file.name.endswith(limits):
                found[str(file)] = file.read_text()
    return found


def processes_of(handle: Handle) -> dict[int, str]:
    """State and name of each process of the workload."""
    found = {}
    for pid in CgroupDriver.workload(groups_of(handle)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(") ")
            found[pid] = f"{name} {rest[0]}"
    return found


def cpu_us(handle: Handle) -> int:
    stat = Path(str(groups_of(handle).v2), WORK, "cpu.stat").read_text()
    return int(stat.split()[1])


async def test_a_hundred_pauses_are_exact(driver: ContainerDriver, large: Handle) -> None:
    sum_ = (await run(driver, large, KEEP, session="s")).stdout
    ticks = Recorder()
    ticking = asyncio.ensure_future(
        run(driver, large, "i=0; while sleep 0.01; do i=$((i+1)); echo $i; done", io=ticks)
    )
    await ticks.started.wait()
    limits, count = settings_of(large), len(processes_of(large))
    for i in range(100):
        await driver.pause(large)
        if i % 25 == 0:
            await driver.reclaim(large)
        await driver.resume(large)
        assert settings_of(large) == limits
    # `sleep` comes and goes, and what makes commands may be made anew
    await until(lambda: abs(len(processes_of(large)) - count) <= 1)
    assert not freezing.is_frozen(groups_of(large), kind="v2")
    assert (await run(driver, large, SEE, session="s")).stdout == sum_
    seen = len(ticks.stdout)
    await until(lambda: len(ticks.stdout) > seen)
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    numbers = ticks.stdout.split()
    assert numbers == [str(n).encode() for n in range(1, len(numbers) + 1)]  # none was lost


@pytest.mark.parametrize("kind", ["v2", "v1"])
async def test_either_freezer_holds_whole_trees(
    harness: ContainerHarness, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = harness.driver
    if kind == "v1" and "freezer" not in driver.shells._cgroups._v1:
        pytest.skip("this kernel has no v1 freezer mounted")
    monkeypatch.setattr(driver.pausing, "_kind", kind)
    handle = await driver.start(harness.spec(uid=new_uid()))
    try:
        busy = "(while :; do :; done) & setsid sh -c 'while :; do :; done' & echo on; wait"
        io = Recorder()
        running = asyncio.ensure_future(run(driver, handle, busy, io=io))
        await io.started.wait()
        await driver.pause(handle)
        assert freezing.is_frozen(groups_of(handle), kind=kind)
        first, before = cpu_us(handle), processes_of(handle)
        await asyncio.sleep(1.0)
        assert cpu_us(handle) - first < 20_000  # what the accounting was behind
        assert processes_of(handle).keys() == before.keys()
        await driver.resume(handle)
        await until(lambda: cpu_us(handle) - first > 40_000)
        await driver.pause(handle)
    finally:
        async with asyncio.timeout(HANG_S):
            await driver.stop(handle)
        await asyncio.gather(running, return_exceptions=True)
    await until(lambda: not any(Path(p).exists() for p in groups_of(handle).v1.values()))


async def test_memory_is_given_back_and_comes_back(driver: ContainerDriver, large: Handle) -> None:
    report = await driver.probe()
    if not report.features["reclaim"].supported:
        pytest.skip(report.features["reclaim"].reason)
    command = 'v=$(head -c 60000000 /dev/urandom | base64); echo "$v" | md5sum'
    sum_ = (await run(driver, large, command, session="s")).stdout
    limits = settings_of(large)
    before = (await driver.usage(large)).memory_bytes
    await driver.pause(large)
    given = await driver.reclaim(large)
    after = (await driver.usage(large)).memory_bytes
    assert before > 80e6 and given > 0 and after <= reclaim.FLOOR_BYTES + 0.02 * before
    assert settings_of(large) == limits
    await driver.resume(large)
    assert (await run(driver, large, SEE, session="s")).stdout == sum_
    over = "head -c 400000000 /dev/zero | tail -c 399999999 | wc -c"
    assert (await run(driver, large, over)).outcome.oom_killed or (
        await driver.usage(large)
    ).oom_kills  # the limit counts swap too, as before


async def test_a_resume_ends_the_reclaim_at_once(driver: ContainerDriver, large: Handle) -> None:
    await run(driver, large, "v=$(head -c 60000000 /dev/urandom | base64)", session="s")
    limits = settings_of(large)
    await driver.pause(large)
    giving = asyncio.ensure_future(driver.reclaim(large))
    await asyncio.sleep(0.02)
    giving.cancel()
    await asyncio.gather(giving, return_exceptions=True)
    assert settings_of(large) == limits
    await driver.resume(large)
    assert (await run(driver, large, "echo up", session="s")).stdout == b"up\n"


async def test_a_sandbox_that_cannot_be_frozen_runs_on(
    driver: ContainerDriver, sandbox: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = settings_of(sandbox)
    monkeypatch.setattr(freezing, "_await_v2", lambda groups, timeout_s: False)
    with pytest.raises(Unavailable, match="frozen"):
        await driver.pause(sandbox)
    assert not freezing.is_frozen(groups_of(sandbox), kind="v2")
    assert settings_of(sandbox) == limits
    assert (await run(driver, sandbox, "echo on", timeout_s=HANG_S)).stdout == b"on\n"


async def test_a_resume_without_a_sign_of_life_leaves_it_paused(
    driver: ContainerDriver, sandbox: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """(L12)"""
    await driver.pause(sandbox)
    agent = driver._live[sandbox.uid].agent
    with monkeypatch.context() as patch:

        async def silent() -> None:
            raise Unavailable("no answer")

        patch.setattr(agent, "resume", silent)
        with pytest.raises(Unavailable):
            await driver.resume(sandbox)
        assert freezing.is_frozen(groups_of(sandbox), kind="v2")
    await driver.resume(sandbox)
    assert (await run(driver, sandbox, "echo on")).stdout == b"on\n"


async def test_limits_that_a_killed_edge_left_lowered_are_restored(
    harness: ContainerHarness,
) -> None:
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    limits = settings_of(handle)
    await harness.driver.pause(handle)
    memory = groups_of(handle).v1.get("memory")
    if memory is None:
        pytest.skip("cgroup v2 lowers no limit")
    Path(memory, WORK, "memory.limit_in_bytes").write_text(str(16 << 20))
    Path(memory, WORK, "memory.swappiness").write_text("100")
    fresh = await harness.restart()
    try:
        found = await fresh.recover(handle, spec)
        assert found is not None
        await fresh.resume(found)
        assert settings_of(handle) == limits
    finally:
        await fresh.stop(handle)


async def test_commands_that_nobody_follows_are_counted(harness: ContainerHarness) -> None:
    """By that an edge that was restarted knows that a sandbox is not idle."""
    spec = harness.spec(uid=new_uid())
    handle = await harness.driver.start(spec)
    io = Recorder()
    left = asyncio.ensure_future(run(harness.driver, handle, "echo on; sleep 1000", io=io))
    await io.started.wait()
    assert await harness.driver.commands(handle) == 1
    fresh = await harness.restart()
    try:
        found = await fresh.recover(handle, spec)
        assert found is not None
        await asyncio.gather(left, return_exceptions=True)  # its connection was replaced
        assert await fresh.commands(found) == 1
    finally:
        await fresh.stop(handle)


async def test_a_kernel_that_refuses_to_reclaim_says_so_and_keeps_limits(
    driver: ContainerDriver, large: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(driver, large, KEEP, session="s")
    limits = settings_of(large)
    await driver.pause(large)

    def broken(work: Path, used: int, step: int, *, v1: bool) -> None:
        raise OSError(5, os.strerror(5))

    # what is pushed out beside it leaves no step to take, now and then
    monkeypatch.setattr(pageout, "pushing", lambda pids, stop: contextlib.nullcontext())
    monkeypatch.setattr(reclaim, "_step", broken)
    with pytest.raises(Unavailable, match="reclaimed"):
        await driver.reclaim(large)
    assert settings_of(large) == limits
    await driver.resume(large)


@pytest.mark.parametrize("mode", ["zram", "file"])
async def test_own_swap_is_found_again_and_removed(tmp_path: Path, mode: str) -> None:
    space = swapspace.SwapSpace(tmp_path, mode, 16)
    state = space.open()
    if not state.usable:
        assert mode in state.reason and not (tmp_path / swapspace.NOTE).exists()
        pytest.skip(state.reason)
    path = json.loads((tmp_path / swapspace.NOTE).read_text())["path"]
    try:
        found = swapspace.entries(Path("/proc/swaps").read_text())
        assert [e.size for e in found if e.path == path] == [(16 << 20) - 4096]
        again = swapspace.SwapSpace(tmp_path, mode, 16)
        assert again.open().usable  # the note of an edge that was killed
        assert json.loads((tmp_path / swapspace.NOTE).read_text())["path"] == path
    finally:
        assert space.close(keep_used=False)
    assert path not in Path("/proc/swaps").read_text()
    assert not list(tmp_path.iterdir())
    if mode == "zram":
        assert not Path("/sys/block", Path(path).name).exists()


async def test_swap_that_is_not_wanted_any_more_is_removed(tmp_path: Path) -> None:
    if not swapspace.SwapSpace(tmp_path, "file", 16).open().usable:
        pytest.skip("swap files cannot be used here")
    swapspace.SwapSpace(tmp_path, "host", 16).open()
    assert str(tmp_path) not in Path("/proc/swaps").read_text()
    assert not list(tmp_path.iterdir())


async def test_swap_that_cannot_be_made_is_said_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object, **_more: object) -> None:
        raise subprocess.CalledProcessError(1, "mkswap", stderr=b"not today")

    monkeypatch.setattr(subprocess, "run", fails)
    state = swapspace.SwapSpace(tmp_path, "file", 16).open()
    assert not state.usable and "not today" in state.reason
    assert not list(tmp_path.iterdir())


async def test_a_mode_of_swap_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        swapspace.SwapSpace(tmp_path, "cloud", 16)
    assert caught.value.field == "swap"
