"""The whole path on real Docker, real NATS, real Postgres and real Valkey."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import docker
import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError
from services.local import LocalSystem
from tests.conformance.harness import SLEEPERS
from tests.e2e.conftest import alive, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ARGS = DSecContainerRunArgs(
    container_image="py:3.11",
    memory_limit_mb=256,
    cpu_cores_limit=1,
    ttl_running_stop=300,
    network_rules={"pypi": True, "npm": False},
    init_user="root",
)


async def test_the_published_calls_work_as_written(container_system) -> None:
    client = DSecClient(
        url=container_system.url,
        api_key=container_system.admin_key,
        project=container_system.project,
    )
    await client.open()
    try:
        sandbox = await client.run_container(ARGS, timeout=120)
        result = await sandbox.run_shell("cd /tmp && export A=1")
        assert result.exit_code == 0
        result = await sandbox.run_shell("pwd; echo $A; python3 -c 'print(6 * 7)'")
        assert result.text.split() == ["/tmp", "1", "42"]
        await sandbox.stop()
    finally:
        await client.close()


async def test_a_sandbox_has_no_network_but_its_own(containers: DSecClient) -> None:
    sandbox = await containers.run_container(ARGS)
    result = await sandbox.exec("sh", "-c", "ls /sys/class/net")
    assert result.text.split() == ["lo"]
    await sandbox.stop()


async def test_memory_over_the_limit_is_reported_as_such(containers: DSecClient) -> None:
    sandbox = await containers.run_container(ARGS)
    result = await sandbox.exec("python3", "-c", "x = bytearray(1 << 30)", timeout=60)
    assert (result.signal, result.oom_killed, result.exit_code) == ("KILL", True, 137)
    assert (await sandbox.exec("echo", "alive")).text == "alive\n"
    await sandbox.stop()


async def test_a_time_limit_ends_the_whole_tree(containers: DSecClient) -> None:
    sandbox = await containers.run_container(ARGS)
    script = "setsid sleep 300 & sleep 300 & echo started; wait"
    async with asyncio.timeout(60):
        result = await sandbox.exec(script, timeout=3)
    assert result.timed_out and result.stdout == b"started\n"
    left = await sandbox.exec("sh", "-c", SLEEPERS)
    assert left.text.strip() == "0"
    await sandbox.stop()


async def test_batches_of_containers_come_and_go_without_a_trace(
    container_system, containers: DSecClient
) -> None:
    for _ in range(2):
        sandboxes = await containers.create_many(ARGS, n=8, timeout=120)
        assert [type(s).__name__ for s in sandboxes] == ["Sandbox"] * 8
        results = await asyncio.gather(*(s.exec("hostname") for s in sandboxes))
        assert all(r.ok for r in results)
        held = _holds(container_system, sandboxes)
        assert _cgroups(held)
        await containers.stop_many(sandboxes)
    await until(
        lambda: _nothing_left(container_system, sandboxes, held), what="nothing left behind"
    )


def _holds(system: LocalSystem, sandboxes: list[Sandbox]) -> list[str]:
    """Ids of the containers that the sandboxes have, by the edge's own notes."""
    found = []
    for sandbox in sandboxes:
        (note,) = system.state_dir.glob(f"nodes/*/**/sandboxes/{_uid(sandbox)}/meta.json")
        found.append(json.loads(note.read_text())["container"])
    return found


def _uid(sandbox: Sandbox) -> str:
    return sandbox.id.rpartition("-")[2]


async def _nothing_left(system: LocalSystem, sandboxes: list[Sandbox], held: list[str]) -> bool:
    uids = [_uid(sandbox) for sandbox in sandboxes]
    listed = {c["Id"] for c in docker.APIClient(timeout=60).containers(all=True)}
    folders = {p.name for p in system.state_dir.glob("nodes/*/**/sandboxes/*")}
    mounts = Path("/proc/self/mounts").read_text()
    left = listed & set(held) or folders & set(uids) or any(uid in mounts for uid in uids)
    return not left and not _cgroups(held)


def _cgroups(names: list[str]) -> list[str]:
    return [
        name
        for root, dirs, _ in os.walk("/sys/fs/cgroup")
        if root.count("/") < 8
        for name in dirs
        if any(one in name for one in names)
    ]


async def test_an_edge_killed_in_mid_create_finishes_or_cleans_up(
    container_system, containers: DSecClient
) -> None:
    kept = await containers.run_container(ARGS)
    await kept.run_shell("export KEPT=yes; echo x > /tmp/kept")
    creating = asyncio.create_task(containers.create_many(ARGS, n=8, timeout=120))
    await asyncio.sleep(0.03)
    edge = next(n for n in container_system.services if n.startswith("edge"))
    await container_system.kill(edge)
    await asyncio.sleep(0.5)
    await container_system.restart(edge)
    results = await creating
    made = [r for r in results if not isinstance(r, DSecError)]
    assert made, f"nothing survived: {results}"
    for sandbox in made:
        assert (await sandbox.exec("true")).ok
    assert (await kept.exec("cat", "/tmp/kept")).text == "x\n", "re-adopted"
    held = _holds(container_system, [kept, *made])
    await containers.stop_many([kept, *made])

    async def all_over() -> bool:
        return not await alive(containers)

    await until(all_over, what="all over")
    await until(
        lambda: _nothing_left(container_system, [kept, *made], held), what="nothing left"
    )
