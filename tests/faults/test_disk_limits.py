"""Limited disks, seen by a client of the whole system on real containers."""

from __future__ import annotations

from typing import Any

import pytest

from libdsec import DSecClient, DSecError, Sandbox
from libdsec.errors import InvalidRequest, NoSpaceLeft
from tests.e2e.conftest import until
from tests.faults.conftest import CREATE_S, World, container_args

pytestmark = [pytest.mark.docker]

MIB = 1 << 20
DISK_MB = 64
WAIT_S = 60.0


async def test_a_full_disk_is_its_sandboxes_own(client: DSecClient, box: Sandbox) -> None:
    """(T03) It is told inside, by the files API, in figures and to audit; nobody else
    feels it."""
    args = container_args(disk_limit_mb=DISK_MB, policy={"resources": {"inodes": 1000}})
    async with await client.run_container(args, timeout=CREATE_S) as limited:
        ran = await limited.exec("dd if=/dev/zero of=/big bs=1M count=200")
        assert ran.exit_code != 0 and b"No space left" in ran.stderr
        written = int((await limited.exec("stat -c %s /big")).text)
        assert DISK_MB * 0.95 <= written / MIB <= DISK_MB * 1.05
        with pytest.raises(NoSpaceLeft) as caught:
            await limited.files.write("/w/more", b"x" * MIB)
        assert caught.value.path == "/w/more" and f"{DISK_MB} MiB" in caught.value.message
        assert caught.value.details["disk_limit_mb"] == DISK_MB
        assert (await limited.metrics())["disk_bytes"] >= DISK_MB * MIB * 0.9

        async def found() -> Any:
            return [e async for e in client.audit.list(kind="finding", target=limited.uid)]

        (entry,) = await until(found, within_s=WAIT_S)
        assert entry.record["rule"] == "disk_fill"

        await box.files.write("/room", b"x" * MIB)
        async with await client.run_container(args, timeout=CREATE_S) as another:
            script = "mkdir /n; i=0; while touch /n/$i; do i=$((i+1)); done; echo $i"
            ran = await another.exec(script)
            assert b"No space left" in ran.stderr and 900 <= int(ran.text) <= 1100
        await limited.files.remove("/big")
        await limited.files.write("/w/more", b"x" * MIB)


async def test_a_limited_disk_outlives_its_edge(world: World) -> None:
    args = container_args(disk_limit_mb=DISK_MB)
    async with await world.client.run_container(args, timeout=CREATE_S) as limited:
        await limited.exec("echo kept > /kept")
        await world.system.kill(world.edge)
        await world.system.restart(world.edge)
        assert (await limited.exec("cat /kept")).text == "kept\n"
        ran = await limited.exec("cat /dev/zero > /fill")
        assert b"No space left" in ran.stderr
        (branch,) = await limited.fork(1)
        assert (await branch.exec("cat /kept")).text == "kept\n"
        await branch.stop()
        folder = world.node_dir / "drivers/container/sandboxes" / limited.uid
        assert folder.exists()

    async def gone() -> bool:
        return not folder.exists()

    await until(gone, within_s=WAIT_S)


async def test_a_limit_that_cannot_be_is_refused_by_name(client: DSecClient) -> None:
    refused = (
        (container_args(disk_limit_mb=2), "disk_limit_mb"),
        (container_args(policy={"resources": {"inodes": 500}}), "policy.resources.inodes"),
    )
    for args, field in refused:
        with pytest.raises(DSecError) as caught:
            await client.run_container(args, timeout=CREATE_S)
        assert isinstance(caught.value, InvalidRequest) and caught.value.field == field
