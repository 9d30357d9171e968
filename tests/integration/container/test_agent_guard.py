"""The agent against its own sandbox: nothing of it is read, reached, stopped or starved."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle
from shared.errors import CapacityExhausted, DsecError, Unavailable
from tests.conformance.harness import HANG_S, new_uid, run
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

STORM_S = 60.0  # for each storm; generous


@pytest.fixture(scope="module")
def intruder(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The program that tries everything; static, because the image has no libc."""
    binary = tmp_path_factory.mktemp("intruder") / "intruder"
    source = Path(__file__).with_name("intruder.c")
    subprocess.run(["cc", "-O1", "-Wall", "-static", "-o", binary, source], check=True)
    return binary.read_bytes()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(harness: ContainerHarness) -> AsyncIterator[Handle]:
    """One sandbox for all: every test shows that it still works."""
    handle = await harness.driver.start(harness.spec(uid=new_uid(), memory_mb=48, pids=48))
    yield handle
    await harness.driver.stop(handle)


async def put(harness: ContainerHarness, box: Handle, path: str, content: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield content

    await harness.driver.write(box, path, chunks(), user="root", mode=0o755)


async def answers(harness: ContainerHarness, box: Handle) -> None:
    """The agent itself, apart from whether there is room for a command."""
    async with asyncio.timeout(STORM_S):
        assert isinstance(await harness.driver._live[box.uid].agent.list(), list)


async def works(harness: ContainerHarness, box: Handle) -> None:
    """Commands, sessions and files, after a storm that may take a moment to end."""
    async with asyncio.timeout(STORM_S):
        while True:
            try:
                ran = await run(harness.driver, box, "echo $((6*7))")
                break
            except DsecError:
                await asyncio.sleep(0.05)
        assert ran.stdout == b"42\n"
        ran = await run(harness.driver, box, "echo in", session="guard")
        assert ran.stdout == b"in\n"
        while True:  # a write that is killed before it begins says so: who asked asks again
            try:
                await put(harness, box, "/tmp/guard", b"x")
                break
            except Unavailable:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_an_intruder_gets_nothing_of_any_process_of_the_agent(
    harness: ContainerHarness, box: Handle, intruder: bytes, user: str
) -> None:
    """(S06) Files of /proc, ptrace, memory, descriptors, limits, every signal."""
    await put(harness, box, "/tmp/intruder", intruder)
    ran = await run(harness.driver, box, ["/tmp/intruder"], user=user)
    assert ran.stdout == b"tried enough\n", ran.stdout.decode()
    await works(harness, box)


@pytest.mark.parametrize("user", ["root", "agent"])
async def test_no_socket_with_a_name_is_in_reach(
    harness: ContainerHarness, box: Handle, user: str
) -> None:
    """(S06) Neither a path nor an abstract name in /proc/net/unix, no socket on the disk."""
    script = "awk 'NR>1 && NF>7' /proc/net/unix; find / -xdev -type s; wc -l </proc/net/unix"
    ran = await run(harness.driver, box, script, user=user)
    assert int(ran.stdout) > 1, "the list itself is readable"


async def test_the_agents_binary_is_no_file_of_the_sandbox(
    harness: ContainerHarness, box: Handle
) -> None:
    """(S06) Not even for a program that the agent runs by a link to its own file."""
    script = (
        "ln -sf /proc/self/exe /tmp/me; find / -xdev -name 'aether*' -not -path '/proc/*'; "
        "for p in /proc/[0-9]*; do [ $(cat $p/comm) = aether ] && cat $p/exe; done; true"
    )
    assert (await run(harness.driver, box, script)).stdout == b""
    ran = await run(harness.driver, box, ["/tmp/me", "/tmp/x.sock"], timeout_s=0.5, user="agent")
    assert ran.outcome.timed_out or ran.code != 0
    await works(harness, box)


@pytest.mark.parametrize("signal", ["STOP", "TSTP", "TTIN", "KILL", "SEGV", "TERM"])
async def test_no_signal_to_everything_stops_or_ends_the_agent(
    harness: ContainerHarness, box: Handle, signal: str
) -> None:
    """(S06) As root: the processes in which commands begin are signalled as well."""
    for _ in range(3):
        shooting = run(harness.driver, box, f"kill -{signal} -1; exit 0", timeout_s=STORM_S)
        assert not (await shooting).outcome.timed_out
        await works(harness, box)


async def test_a_storm_of_stops_holds_nothing_up_for_good(
    harness: ContainerHarness, box: Handle
) -> None:
    """(S06) Commands that begin while everything is being stopped."""
    storm = asyncio.create_task(
        run(harness.driver, box, "while :; do kill -STOP -1; done", timeout_s=1)
    )
    await asyncio.sleep(0.2)
    others = [run(harness.driver, box, "true", timeout_s=2) for _ in range(8)]
    await asyncio.gather(*others, return_exceptions=True)
    assert (await storm).outcome.timed_out
    await works(harness, box)


STORMS = {
    "fork bomb": "b() { b | b & }; b; sleep 1",
    "all of the pids": "i=0; while [ $i -lt 200 ]; do sleep 1 & i=$((i+1)); done; sleep 1",
    "all of the memory": "i=0; while [ $i -lt 6 ]; do tail /dev/zero & i=$((i+1)); done; sleep 1",
    "all of the memory, in files": "dd if=/dev/zero of=/dev/shm/x bs=1M; sleep 1",
    "all of the descriptors": "while exec 5</dev/null; do sleep 0.01 5<&5 & done; sleep 1",
}


@pytest.mark.parametrize("storm", STORMS)
async def test_the_agent_answers_while_the_workload_takes_all_it_can(
    harness: ContainerHarness, box: Handle, storm: str
) -> None:
    """(S06) It is outside the workload's limits: it answers, and refuses by type what
    there is no room for."""
    task = asyncio.create_task(
        run(harness.driver, box, f"({STORMS[storm]}) >/dev/null 2>&1", timeout_s=1)
    )
    for _ in range(5):
        await asyncio.sleep(0.1)
        await answers(harness, box)
        with contextlib.suppress(CapacityExhausted, Unavailable):
            async with asyncio.timeout(STORM_S):
                await run(harness.driver, box, "true", timeout_s=5)
    await asyncio.wait({task}, timeout=STORM_S)
    assert task.done()
    async with asyncio.timeout(HANG_S):
        while not await recovered(harness, box):  # what is dead has room until it is reaped
            await asyncio.sleep(0.05)


async def recovered(harness: ContainerHarness, box: Handle) -> bool:
    try:
        await run(harness.driver, box, "rm -f /dev/shm/x; kill -9 -1")
        await works(harness, box)
    except (CapacityExhausted, Unavailable):
        return False
    return True


async def test_the_agent_is_in_no_group_of_the_workload(
    harness: ContainerHarness, box: Handle
) -> None:
    """(S06) Its own memory counts against nobody's limit, and nothing limits it."""
    groups = box.data["groups"]
    pid = str(box.data["pid"])
    work = [Path(d) / "work" for d in (*groups["v1"].values(), groups["v2"])]
    for folder in work:
        members = {p for f in folder.rglob("cgroup.procs") for p in f.read_text().split()}
        assert pid not in members
    assert any(f.read_text().split() for w in work for f in w.rglob("cgroup.procs"))
