"""Transfers under which a connection or the node's service goes, and slow or large ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from libdsec import FileChanged, Sandbox
from tests.faults.conftest import World

pytestmark = [pytest.mark.docker]

SIZE = 96 << 20
BACK_S = 30.0


class Cut:
    """Counts a transfer's bytes and stops to do something once, in the middle."""

    def __init__(self, at_bytes: int) -> None:
        self.at_bytes, self.count, self.most_back = at_bytes, 0, 0
        self.reached = asyncio.Event()

    def __call__(self, count: int) -> None:
        self.count += count
        self.most_back = max(self.most_back, -count)
        if self.count >= self.at_bytes:
            self.reached.set()


async def with_restart(
    world: World, how: str, cut: Cut, transfer: Awaitable[object],
    meanwhile: Callable[[], Awaitable[object]] | None = None,
) -> None:  # fmt: skip
    """Runs a transfer and restarts the node's service, or the bus, under it."""
    running = asyncio.ensure_future(transfer)
    try:
        async with asyncio.timeout(BACK_S * 2):
            await cut.reached.wait()
            if how == "bus":
                await world.system.restart_infra("nats", kill=True)
            else:
                if how == "kill":
                    await world.system.kill(world.edge)
                await world.system.restart(world.edge)
            if meanwhile is not None:
                await meanwhile()
            await running
    finally:
        running.cancel()


def content(folder: Path) -> Path:
    path = folder / "content"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("how", ["kill", "stop", "bus"])
async def test_an_upload_goes_on_where_it_was(
    world: World, box: Sandbox, tmp_path: Path, how: str
) -> None:
    """(F01) ... and the old file stays until all of the new one is there."""
    local = content(tmp_path)
    await box.files.write("/up/f", b"old")
    cut = Cut(SIZE // 3)
    await with_restart(
        world, how, cut, box.files.upload(local, "/up/f", on_progress=cut)
    )  # fmt: skip
    ran = await box.exec("sha256sum /up/f; ls -A /up")
    assert ran.text.split() == [digest(local), "/up/f", "f"]
    assert cut.count == SIZE and cut.most_back == 0  # nothing began again


@pytest.mark.parametrize("how", ["kill", "stop", "bus"])
async def test_a_download_goes_on_where_it_was(
    world: World, box: Sandbox, tmp_path: Path, how: str
) -> None:
    """(F01)"""
    await box.exec(f"mkdir -p /down && head -c {SIZE} /dev/urandom >/down/f")
    cut, back = Cut(SIZE // 3), tmp_path / "back"
    await with_restart(world, how, cut, box.files.download("/down/f", back, on_progress=cut))
    assert (await box.exec("sha256sum", "/down/f")).text.split()[0] == digest(back)
    assert cut.count == SIZE and cut.most_back == 0
    assert [p.name for p in tmp_path.iterdir()] == ["back"]


async def test_a_changed_file_is_not_spliced(
    world: World, box: Sandbox, tmp_path: Path
) -> None:
    """(F01) The same length, another content: a download begins again, a stream fails."""
    await box.exec(f"mkdir -p /down && head -c {SIZE} /dev/zero >/down/g")

    async def change() -> None:
        await box.exec("tr '\\0' x </down/g >/down/h && touch -r /down/g /down/h && "
                       "cat /down/h >/down/g && touch -r /down/h /down/g")  # fmt: skip

    started, go = asyncio.Event(), asyncio.Event()

    async def stream() -> bytes:
        parts = []
        async for part in box.files.stream("/down/g"):
            parts.append(part)
            started.set()
            await go.wait()  # the window fills, the rest waits in the sandbox
        return b"".join(parts)

    streaming = asyncio.create_task(stream())
    await started.wait()
    await world.system.kill(world.edge)
    await world.system.restart(world.edge)
    await change()
    go.set()
    with pytest.raises(FileChanged, match="/down/g"):
        async with asyncio.timeout(BACK_S):
            await streaming
    data = await box.files.read("/down/g")
    assert data == b"x" * SIZE


async def test_a_tree_goes_on_over_a_restart(
    world: World, box: Sandbox, tmp_path: Path
) -> None:
    local, back = tmp_path / "in", tmp_path / "out"
    noise = random.Random(1)
    for i in range(3000):
        (local / f"d{i % 7}").mkdir(parents=True, exist_ok=True)
        (local / f"d{i % 7}" / f"f{i}").write_bytes(noise.randbytes(4000))
    for i in range(3):
        (local / f"large{i}").write_bytes(noise.randbytes(8 << 20))
    cut = Cut(10 << 20)
    await with_restart(
        world, "kill", cut, box.files.upload_tree(local, "/tree", on_progress=cut)
    )
    cut = Cut(10 << 20)
    await with_restart(
        world, "stop", cut, box.files.download_tree("/tree", back, on_progress=cut)
    )
    names = sorted(p.relative_to(local) for p in local.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(back) for p in back.rglob("*") if p.is_file())
    assert all((local / n).read_bytes() == (back / n).read_bytes() for n in names)
    assert (await box.exec("find /tree -name '.dsec*'")).text == ""


async def test_large_files_at_once_leave_the_node_small(
    world: World, box: Sandbox, tmp_path: Path
) -> None:
    """(F08)"""
    pid = world.system.pids[world.edge]
    before_kb, sizes = _rss_kb(pid), []
    source = tmp_path / "big"
    source.write_bytes(os.urandom(1 << 20) * 64)

    async def watch() -> None:
        while True:
            sizes.append(_rss_kb(pid))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(box.files.upload(source, f"/big{i}") for i in range(4)))
    await asyncio.gather(*(box.files.download(f"/big{i}", tmp_path / f"b{i}") for i in range(4)))
    watching.cancel()
    assert max(sizes) - before_kb < 128 << 10  # four of 64 MiB each way
    assert digest(tmp_path / "b3") == digest(source)
    await box.exec("rm -f /big*")


async def test_a_slow_source_has_all_the_time_it_needs(box: Sandbox) -> None:
    """(F08) Longer than any silence that an operation may have."""

    async def slow() -> AsyncIterator[bytes]:
        for i in range(3):
            yield b"%d" % i
            await asyncio.sleep(5.5)

    assert await box.files.write("/slow", slow()) == 3
    assert await box.files.read("/slow") == b"012"


async def test_a_write_of_a_client_that_broke_off_leaves_nothing(box: Sandbox) -> None:
    """(F01)"""
    await box.files.write("/cut/f", b"old")

    async def breaks() -> AsyncIterator[bytes]:
        yield b"x" * (1 << 20)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        await box.files.write("/cut/f", breaks())
    async with asyncio.timeout(10):
        while (await box.exec("ls", "-A", "/cut")).text != "f\n":
            await asyncio.sleep(0.1)
    assert await box.files.read("/cut/f") == b"old"


def _rss_kb(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
