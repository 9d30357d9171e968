"""Limited disks of real sandboxes: full inside, nothing felt outside, nothing left."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.disks import loops
from services.edge.disks.images import NAME
from services.edge.drivers.base import Handle, Layer
from services.edge.drivers.container import ContainerDriver
from shared.errors import InvalidRequest, QuotaExceeded, Unsupported
from tests.conformance.harness import new_uid, run, until
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.limited import (
    FILL,
    MIB,
    chunks,
    fill,
    fill_with_files,
    free_bytes,
)  # fmt: skip
from tests.integration.container.test_capturing import captured_layer

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]

DISK_MB, INODES = 32, 1000
NO_LAYER = Layer("0" * 64, "/nowhere/meta")


@pytest_asyncio.fixture(loop_scope="module")
async def limited(harness: ContainerHarness) -> AsyncIterator[Handle]:
    handle = await harness.driver.start(
        harness.spec(uid=new_uid(), disk_mb=DISK_MB, inodes=INODES)
    )
    yield handle
    await harness.driver.stop(handle)


def image(harness: ContainerHarness, handle: Handle) -> Path:
    return harness.settings.sandboxes_dir / handle.uid / NAME


def bound(harness: ContainerHarness, handle: Handle) -> bool:
    """Whether the sandbox's device still has its file."""
    return loops._backing(handle.data["disk"]["loop"]).startswith(str(image(harness, handle)))



async def test_a_sandbox_that_fills_its_disk_is_alone_with_it(
    harness: ContainerHarness, limited: Handle, sandbox: Handle
) -> None:
    """(T03) It has what it was promised, not more; others write and start."""
    driver = harness.driver
    await fill(driver, limited, DISK_MB, most=1.03)
    assert image(harness, limited).stat().st_blocks * 512 <= DISK_MB * MIB * 1.2

    assert (await run(driver, sandbox, "head -c 50000000 /dev/zero > /more")).outcome.exit_code == 0
    assert (await driver.usage(sandbox)).disk_bytes >= 50_000_000
    another = await driver.start(harness.spec(uid=new_uid(), disk_mb=DISK_MB))
    assert (await run(driver, another, "echo x > /x; cat /x")).stdout == b"x\n"
    await driver.stop(another)

    assert (await run(driver, limited, "rm /fill; echo y > /y; sync; cat /y")).stdout == b"y\n"
    assert not (await driver.counters([limited]))[0].disk_full
    await until(lambda: image(harness, limited).stat().st_blocks * 512 < DISK_MB * MIB / 2)


async def test_files_are_limited_too(harness: ContainerHarness, limited: Handle) -> None:
    """(T03)"""
    await fill_with_files(harness.driver, limited, INODES * 0.95, INODES * 1.05)


async def test_a_full_disk_is_an_error_by_path_and_limit(
    harness: ContainerHarness, limited: Handle
) -> None:
    driver = harness.driver
    large = [b"x" * MIB] * (2 * DISK_MB)
    with pytest.raises(QuotaExceeded) as caught:
        await driver.write(limited, "/data/large", chunks(*large), user=None)
    assert caught.value.details["errno"] == "ENOSPC"
    assert caught.value.details["disk_limit_mb"] == DISK_MB
    assert "/data/large" in caught.value.message and f"{DISK_MB} MiB" in caught.value.message
    left = await run(driver, limited, "find /data -type f | wc -l")
    assert left.stdout == b"0\n", "nothing of it is left half"
    await run(driver, limited, "i=0; while mkdir -p /m/$i; do i=$((i+1)); done")
    with pytest.raises(QuotaExceeded):
        await driver.mkdir(limited, "/data/new", user=None)


async def test_a_limit_that_cannot_be_is_refused_by_name(harness: ContainerHarness) -> None:
    before = harness.leftovers()
    cases = (
        ({"disk_mb": 1}, "disk_limit_mb"), ({"inodes": 500}, "policy.resources.inodes"),
        ({"disk_mb": 4096, "inodes": 100}, "policy.resources.inodes"),
    )  # fmt: skip
    for changes, field in cases:
        with pytest.raises(InvalidRequest) as caught:
            await harness.driver.start(harness.spec(uid=new_uid(), **changes))
        assert caught.value.field == field
    assert harness.leftovers() <= before


async def test_a_node_without_a_mechanism_says_so_and_refuses(
    harness: ContainerHarness, tmp_path: Path
) -> None:
    settings = replace(harness.settings, state_dir=tmp_path, disks="none")
    without = ContainerDriver(settings)
    report = await without.probe()
    assert not report.features["disk_limit"].supported
    assert "no disks" in report.features["disk_limit"].reason
    with pytest.raises(Unsupported) as caught:
        await without.start(harness.spec(uid=new_uid(), disk_mb=DISK_MB))
    assert caught.value.field == "disk_limit_mb"
    await without.close()


async def test_it_pauses_is_captured_and_branched(
    harness: ContainerHarness, limited: Handle, tmp_path: Path
) -> None:
    driver = harness.driver
    script = "echo common > /common; rm /etc/group; head -c 3000000 /dev/urandom > /large"
    await run(driver, limited, script)
    digest = (await run(driver, limited, "md5sum /large")).stdout
    layer, packed = await captured_layer(driver, limited, tmp_path / "layer")
    assert packed.manifest.data_bytes >= 3_000_000
    await driver.pause(limited)
    captured = await driver.capture(limited, new_uid())
    spec = harness.spec(uid=new_uid(), captures=captured.captures, disk_mb=DISK_MB)
    branch = await driver.start(spec)
    await driver.release(captured.id)
    await driver.resume(limited)
    restored = await driver.start(
        harness.spec(uid=new_uid(), layers=[harness.layer, layer], disk_mb=DISK_MB)
    )
    look = "md5sum /large; cat /common; ls /etc/group 2>/dev/null"
    for handle in (branch, restored):
        assert (await run(driver, handle, look)).stdout == digest + b"common\n"
        # what was captured lies below: the branch has its whole disk for itself
        assert await free_bytes(driver, handle) >= DISK_MB * MIB * 0.95
    for handle in (branch, restored):
        await driver.stop(handle)
    assert (await run(driver, limited, "cat /common")).stdout == b"common\n"


async def test_it_outlives_the_edge_and_then_ends_without_a_trace(
    harness: ContainerHarness,
) -> None:
    spec = harness.spec(uid=new_uid(), disk_mb=DISK_MB)
    handle = await harness.driver.start(spec)
    await run(harness.driver, handle, "echo kept > /kept")
    again = await harness.restart()
    try:
        assert await again.recover(handle, spec) is not None
        assert (await run(again, handle, "cat /kept")).stdout == b"kept\n"
        ran = await run(again, handle, FILL)
        assert b"No space left" in ran.stderr
        captured = await again.capture(handle, new_uid())
        assert (Path(captured.folders[0]) / "kept").read_text() == "kept\n"
        await again.release(captured.id)
        assert bound(harness, handle)
    finally:
        await again.stop(handle)
    assert not bound(harness, handle)
    assert not image(harness, handle).parent.exists()


async def test_a_crash_leaves_nothing_that_a_sweep_does_not_find(
    harness: ContainerHarness,
) -> None:
    """An edge that died, and a sandbox that died of itself."""
    driver = harness.driver
    handle = await driver.start(harness.spec(uid=new_uid(), disk_mb=DISK_MB))
    await run(driver, handle, FILL)
    again = await harness.restart()
    keep = frozenset(uid for uid in os.listdir(harness.settings.sandboxes_dir)) - {handle.uid}
    assert await again.sweep(keep) == [handle.uid]
    assert not bound(harness, handle)
    assert not image(harness, handle).parent.exists()

    died = await driver.start(harness.spec(uid=new_uid(), disk_mb=DISK_MB))
    await harness.crash(died)
    await until(lambda: any(e.uid == died.uid for e in harness.exits()))
    await driver.stop(died)
    await until(lambda: not bound(harness, died))
    assert not image(harness, died).parent.exists()


async def test_many_at_once_have_a_disk_each(harness: ContainerHarness) -> None:
    """More than a machine has loop devices at first; a start that fails leaves none."""
    driver = harness.driver
    specs = [harness.spec(uid=new_uid(), disk_mb=16 + number) for number in range(12)]
    handles = await asyncio.gather(*(driver.start(spec) for spec in specs))
    assert len({handle.data["disk"]["loop"] for handle in handles}) == 12
    said = await asyncio.gather(*(run(driver, h, f"echo {h.uid} > /me") for h in handles))
    assert all(ran.outcome.exit_code == 0 for ran in said)
    for handle in handles:
        assert (await run(driver, handle, "cat /me")).stdout.decode().strip() == handle.uid
    await asyncio.gather(*(driver.stop(handle) for handle in handles))
    assert not any(bound(harness, handle) for handle in handles)
    bad = harness.spec(uid=new_uid(), disk_mb=DISK_MB, layers=[NO_LAYER])
    before = harness.leftovers()
    with pytest.raises(Exception, match="layer"):
        await driver.start(bad)
    assert harness.leftovers() <= before
