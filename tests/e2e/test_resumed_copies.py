"""A copy of one file that broke off is gone on with by a later call, in the same unchanged
file alone."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec._wire import CHUNK_BYTES
from libdsec.sandbox import Sandbox

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SIZE = 8 * 1024 * 1024
ARGS = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=128, cpu_cores_limit=1)


class Broken(Exception):
    """What breaks a copy off."""


class Progress:
    """Counts; breaks off once ``at`` bytes were taken over."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.counts: list[int] = []

    def __call__(self, count: int) -> None:
        self.counts.append(count)
        if self.at is not None and sum(self.counts) >= self.at:
            raise Broken


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(containers: DSecClient) -> AsyncIterator[Sandbox]:
    async with await containers.run_container(ARGS) as made:
        yield made


def parts(folder: Path) -> list[Path]:
    return [p for p in folder.iterdir() if p.name.endswith(".dsec-part")]


async def test_a_download_goes_on_in_a_later_call(sandbox: Sandbox, tmp_path: Path) -> None:
    content = os.urandom(SIZE)
    await sandbox.files.write("/tmp/down", content)
    target = tmp_path / "down"
    with pytest.raises(Broken):
        await sandbox.files.download(
            "/tmp/down", target, resume=True, on_progress=Progress(SIZE // 2)
        )
    assert not target.exists()
    had = parts(tmp_path)[0].stat().st_size
    assert SIZE // 2 <= had < SIZE
    progress = Progress()
    assert (
        await sandbox.files.download("/tmp/down", target, resume=True, on_progress=progress) == SIZE
    )
    assert (progress.counts[0], sum(progress.counts)) == (had, SIZE)
    assert target.read_bytes() == content
    assert parts(tmp_path) == []


async def test_a_part_of_another_content_is_not_gone_on_with(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    await sandbox.files.write("/tmp/changed", os.urandom(SIZE))
    target = tmp_path / "changed"
    with pytest.raises(Broken):
        await sandbox.files.download("/tmp/changed", target, resume=True, on_progress=Progress(1))
    content = os.urandom(SIZE)
    await sandbox.files.write("/tmp/changed", content)
    await sandbox.files.download("/tmp/changed", target, resume=True)
    assert target.read_bytes() == content


async def test_an_upload_goes_on_in_a_later_call(sandbox: Sandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(content := os.urandom(SIZE))
    source.chmod(0o640)
    with pytest.raises(Broken):
        await sandbox.files.upload(
            source, "/srv/new/up", resume=True, on_progress=Progress(SIZE // 2)
        )
    assert not await sandbox.files.exists("/srv/new/up")
    had = (await sandbox.files.list("/srv/new"))[0].size  # more of it may be on its way
    assert had > CHUNK_BYTES, "a copy that is begun anew counts a chunk first"
    progress = Progress()
    assert (
        await sandbox.files.upload(source, "/srv/new/up", resume=True, on_progress=progress) == SIZE
    )
    assert had <= progress.counts[0] < SIZE
    assert sum(progress.counts) == SIZE
    assert await sandbox.files.read("/srv/new/up") == content
    assert [(f.path, f.mode) for f in await sandbox.files.list("/srv/new")] == [
        ("/srv/new/up", 0o640)
    ]


async def test_a_part_that_is_longer_than_its_file_is_begun_again(
    sandbox: Sandbox, tmp_path: Path
) -> None:
    """As where an earlier call was still at it."""
    source = tmp_path / "source"
    source.write_bytes(content := os.urandom(SIZE))
    with pytest.raises(Broken):
        await sandbox.files.upload(source, "/srv/two/up", resume=True, on_progress=Progress(1))
    part = (await sandbox.files.list("/srv/two"))[0].path
    await sandbox.exec(["truncate", "-s", str(SIZE + 1), part], check=True)
    assert await sandbox.files.upload(source, "/srv/two/up", resume=True) == SIZE
    assert await sandbox.files.read("/srv/two/up") == content
    assert len(await sandbox.files.list("/srv/two")) == 1
