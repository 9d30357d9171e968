"""Limits of disk by project quotas of XFS: the driver's sandboxes on a real one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.edge.disks import quotas
from services.edge.drivers.base import Handle
from services.edge.machine import kernel
from shared.errors import QuotaExceeded
from tests.conformance.harness import new_uid, run, until
from tests.guestvm.inside.harness import guest_harness, say
from tests.integration.container.harness import ContainerHarness
from tests.integration.container.limited import (
    FILL,
    MIB,
    SAID_S,
    chunks,
    fill,
    fill_with_files,
    free_bytes,
)  # fmt: skip

pytestmark = pytest.mark.asyncio(loop_scope="module")
DISK_MB, INODES = 16, 300
IMAGE_MB = 400  # mkfs.xfs makes none below 300 MiB
ATTEMPT = Path("/out/attempt")


def mounted(folder: Path, options: str) -> Path:
    """An XFS of its own in a file of ``folder``."""
    image, at = folder / "xfs.img", folder / "xfs"
    image.touch()
    os.truncate(image, IMAGE_MB * MIB)
    at.mkdir()
    subprocess.run(["mkfs.xfs", "-q", image], check=True)
    subprocess.run(["mount", "-o", f"loop,{options}", image, at], check=True)
    return at


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    at = mounted(tmp_path_factory.mktemp("xfs"), "prjquota")
    yield at
    subprocess.run(["umount", at], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(disk: Path) -> AsyncIterator[ContainerHarness]:
    async with guest_harness(disk) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def limited(harness: ContainerHarness) -> AsyncIterator[Handle]:
    handle = await harness.driver.start(
        harness.spec(uid=new_uid(), disk_mb=DISK_MB, inodes=INODES)
    )
    yield handle
    await harness.driver.stop(handle)


def place(harness: ContainerHarness, handle: Handle) -> Path:
    return harness.settings.sandboxes_dir / handle.uid


def held(disk: Path, project: int) -> tuple[int, ...]:
    """What the file system has of a project: limits and use, in its units. XFS counts files
    off a moment after they are gone."""
    found = bytearray(quotas.LIMITS.size)
    fd = os.open(disk, os.O_RDONLY)
    try:
        kernel.project_quota(fd, quotas.GET, project, found)
    except (FileNotFoundError, ProcessLookupError):  # it knows nothing of it
        return ()
    finally:
        os.close(fd)
    return tuple(quotas.LIMITS.unpack(found)[4:])


async def test_the_node_says_that_it_limits_by_quotas(
    harness: ContainerHarness, limited: Handle
) -> None:
    report = await harness.driver.probe()
    assert report.features["disk_limit"].supported
    assert report.features["disk_limit"].reason == "project quota"
    assert limited.enforcement["disk_mb"] == "project quota"


async def test_bytes_are_held_to_for_root_too_and_nobody_else_feels_it(
    harness: ContainerHarness, limited: Handle
) -> None:
    driver = harness.driver
    await fill(driver, limited, DISK_MB)
    with pytest.raises(QuotaExceeded) as caught:
        await driver.write(limited, "/more", chunks(b"x" * MIB), user=None)
    assert caught.value.details["disk_limit_mb"] == DISK_MB

    other = await driver.start(harness.spec(uid=new_uid(), disk_mb=2 * DISK_MB))
    free = await run(driver, other, f"head -c {DISK_MB * MIB} /dev/zero > /f; echo $?")
    assert free.stdout == b"0\n"
    await driver.stop(other)

    assert await say(harness, limited, "rm -f /fill; echo y > /y; cat /y") == "y"
    await until(lambda: os.statvfs(place(harness, limited) / "disk").f_bavail > 0)
    assert not (await driver.counters([limited]))[0].disk_full


async def test_files_are_held_to(harness: ContainerHarness, limited: Handle) -> None:
    await fill_with_files(harness.driver, limited, INODES * 0.9, INODES)


async def test_nothing_inside_takes_a_file_out_of_its_project(
    harness: ContainerHarness, limited: Handle
) -> None:
    """Root in a sandbox is root to the file system, where whose a file is can be changed."""
    driver = harness.driver
    await driver.write(limited, "/attempt", chunks(ATTEMPT.read_bytes()), user="root", mode=0o755)
    await say(harness, limited, "mkdir /d; head -c 1000000 /dev/zero > /d/f")
    for what in ("relabel", "relabel-flags", "relabel-setattr"):
        for path in ("/d/f", "/d", "/"):
            assert await say(harness, limited, f"/attempt {what} {path}") == "EPERM", (what, path)
    upper = place(harness, limited) / "disk/upper"
    project = limited.data["disk"]["project"]
    assert {quotas.project_of(upper / name) for name in ("", "d", "d/f")} == {project}
    ran = await run(driver, limited, "cat /dev/zero > /d/f", timeout_s=SAID_S)
    assert b"No space left" in ran.stderr


async def test_a_branch_has_its_whole_disk_for_itself(
    harness: ContainerHarness, limited: Handle
) -> None:
    driver = harness.driver
    await say(harness, limited, f"head -c {DISK_MB * MIB // 2} /dev/urandom > /large")
    digest = await say(harness, limited, "md5sum /large")
    captured = await driver.capture(limited, new_uid())
    branch = await driver.start(
        harness.spec(uid=new_uid(), captures=captured.captures, disk_mb=DISK_MB)
    )
    await driver.release(captured.id)
    try:
        assert await say(harness, branch, "md5sum /large") == digest
        assert await free_bytes(driver, branch) >= DISK_MB * MIB * 0.95
    finally:
        await driver.stop(branch)


async def test_a_stop_frees_the_room_and_the_project(
    harness: ContainerHarness, disk: Path
) -> None:
    driver = harness.driver
    handle = await driver.start(harness.spec(uid=new_uid(), disk_mb=DISK_MB, inodes=INODES))
    await run(driver, handle, FILL, timeout_s=SAID_S)
    project = handle.data["disk"]["project"]
    blocks, _soft, inodes, _files, taken, _ = held(disk, project)
    assert (blocks * 512, inodes) == (DISK_MB * MIB, INODES)
    assert taken * 512 >= DISK_MB * MIB * 0.97
    await driver.stop(handle)
    await until(lambda: not any(held(disk, project)))
    assert not place(harness, handle).exists()


async def test_a_new_edge_finds_limits_in_force_and_what_a_dead_one_left(
    harness: ContainerHarness, disk: Path
) -> None:
    """The second died before it had noted the sandbox."""
    spec = harness.spec(uid=new_uid(), disk_mb=DISK_MB)
    handle = await harness.driver.start(spec)
    orphan = harness.settings.sandboxes_dir / new_uid()
    orphan.mkdir()
    made = harness.driver._disks.make(orphan, quotas.Room(DISK_MB, INODES))
    again = await harness.restart()
    try:
        assert await again.recover(handle, spec) is not None
        ran = await run(again, handle, FILL, timeout_s=SAID_S)
        assert b"No space left" in ran.stderr
        keep = frozenset(os.listdir(harness.settings.sandboxes_dir)) - {orphan.name}
        assert await again.sweep(keep) == [orphan.name]
        assert not orphan.exists()
        await until(lambda: not any(held(disk, made.note["project"])))
    finally:
        await again.stop(handle)
    await until(lambda: not any(held(disk, handle.data["disk"]["project"])))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[Path]:
    at = mounted(tmp_path, "noquota")
    yield at
    subprocess.run(["umount", at], check=True)


async def test_an_xfs_without_quotas_is_not_taken_for_one_with_them(plain: Path) -> None:
    found = quotas.Quotas(plain).probe()
    assert not found.works and "quota" in found.reason
