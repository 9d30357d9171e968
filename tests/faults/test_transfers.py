"""Transfers under which a connection or the node's service goes, and slow or large ones."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import FileChanged, Sandbox
from schemas.exec import KEEPALIVE_S
from tests.e2e.conftest import until
from tests.faults.conftest import World
from tests.faults.ledger import held
from tests.faults.test_watch import watching

pytestmark = [pytest.mark.docker]

SIZE = 32 << 20
BACK_S = 60.0


class Progress:
    """Counts a transfer's bytes, and what was taken back of them."""

    def __init__(self, at_bytes: int) -> None:
        self.at_bytes, self.count, self.back = at_bytes, 0, 0
        self.reached = asyncio.Event()

    def __call__(self, count: int) -> None:
        self.count += count
        self.back += max(-count, 0)
        if self.count >= self.at_bytes:
            self.reached.set()


async def restart(world: World, how: str) -> None:
    """The node's service, killed or ended, or the bus."""
    if how == "bus":
        await world.system.restart_infra("nats", kill=True)
        return
    if how == "kill":
        await world.system.kill(world.edge)
    await world.system.restart(world.edge)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def many(root: Path) -> Path:
    """Many small files and some large ones."""
    noise = random.Random(1)
    for i in range(600):
        (root / f"d{i % 7}").mkdir(parents=True, exist_ok=True)
        (root / f"d{i % 7}" / f"f{i}").write_bytes(noise.randbytes(4000))
    for i in range(3):
        (root / f"large{i}").write_bytes(noise.randbytes(2 << 20))
    return root


def files_below(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("how", ["kill", "stop", "bus"])
async def test_transfers_go_on_where_they_were(
    world: World, box: Sandbox, tmp_path: Path, how: str
) -> None:
    """(F01) Single files both ways and trees both ways, all under way at once."""
    local, back = tmp_path / "content", tmp_path / "back"
    local.write_bytes(random.Random(7).randbytes(SIZE))
    tree, tree_back = many(tmp_path / "tree"), tmp_path / "tree_back"
    await box.exec(f"rm -rf /tr; mkdir /tr; head -c {SIZE} /dev/urandom >/tr/down")
    await box.files.write("/tr/up", b"old")
    await box.files.upload_tree(tree, "/tr/from")
    up, down, up_tree, down_tree = (Progress(SIZE // 8), Progress(SIZE // 8),
                                    Progress(1 << 18), Progress(1 << 18))  # fmt: skip
    transfers = [
        box.files.upload(local, "/tr/up", on_progress=up),
        box.files.download("/tr/down", back, on_progress=down),
        box.files.upload_tree(tree, "/tr/to", on_progress=up_tree),
        box.files.download_tree("/tr/from", tree_back, on_progress=down_tree),
    ]
    running = asyncio.gather(*transfers)
    async with asyncio.timeout(BACK_S * 2):
        await asyncio.gather(up.reached.wait(), down.reached.wait())
        assert not running.done()
        await restart(world, how)
        await running
    ran = await box.exec("sha256sum /tr/up /tr/down; find /tr -name '.dsec*'")
    assert ran.text.split() == [digest(local), "/tr/up", digest(back), "/tr/down"]
    assert (up.count, up.back, down.count, down.back) == (SIZE, 0, SIZE, 0)  # nothing again
    assert files_below(tree_back) == files_below(tree)
    assert (await box.files.upload_tree(tree, "/tr/to")).files == 0
    assert {p.name for p in tmp_path.iterdir()} == {"content", "back", "tree", "tree_back"}


async def test_a_changed_file_is_not_spliced(world: World, box: Sandbox) -> None:
    """(F01) The same length, another content: a read begins again, a stream fails. A watch
    goes on, and says that nobody looked meanwhile."""
    size = 24 << 20
    await box.exec(f"mkdir -p /sp; head -c {size} /dev/zero >/sp/f; tr '\\0' x </sp/f >/sp/g")
    started, go = asyncio.Event(), asyncio.Event()

    async def stream() -> None:
        async for _ in box.files.stream("/sp/f"):
            started.set()
            await go.wait()  # the window fills, the rest waits in the sandbox

    async with watching(box, "/sp") as seen:
        streaming = asyncio.create_task(stream())
        await started.wait()
        change = "cat /sp/g >/sp/f; touch -r /sp/g /sp/f; touch /sp/done"
        await box.exec(f"(until [ -e /tmp/change ]; do sleep .05; done; {change}) &")
        root = Path(f"/proc/{min(held(world, box.uid).pids)}/root")
        await world.system.kill(world.edge)
        (root / "tmp/change").touch()

        async def changed() -> bool:
            return (root / "sp/done").exists()

        await until(changed, what="it changes while nobody looks")
        await world.system.restart(world.edge)
        await seen.until("overflow", "/sp")
        await box.exec("touch /sp/after")
        await seen.until("created", "/sp/after")
    go.set()
    with pytest.raises(FileChanged, match="/sp/f"):
        async with asyncio.timeout(BACK_S):
            await streaming
    assert await box.files.read("/sp/f") == b"x" * size


async def test_a_local_file_that_changes_under_its_upload_is_not_mixed(
    box: Sandbox, tmp_path: Path
) -> None:
    local = tmp_path / "log"
    local.write_bytes(b"a" * (8 << 20))
    changes = iter([b"b" * (8 << 20)])

    def change(_count: int) -> None:
        if (content := next(changes, None)) is not None:
            local.write_bytes(content)

    await box.files.upload(local, "/log", on_progress=change)
    assert await box.files.read("/log") == local.read_bytes()

    def grow(count: int) -> None:
        if count > 0:
            with local.open("ab") as sink:
                sink.write(b"more")

    with pytest.raises(FileChanged, match="log"):
        await box.files.upload(local, "/log", on_progress=grow)
    assert await box.files.read("/log") == b"b" * (8 << 20)


async def test_large_files_at_once_leave_the_node_small(
    world: World, box: Sandbox, tmp_path: Path
) -> None:
    """(F08)"""
    pid = world.system.pids()[world.edge]
    before_kb, sizes = _rss_kb(pid), []
    source = tmp_path / "big"
    source.write_bytes(os.urandom(1 << 20) * 48)

    async def watch() -> None:
        while True:
            sizes.append(_rss_kb(pid))
            await asyncio.sleep(0.02)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(box.files.upload(source, f"/big{i}") for i in range(4)))
    await asyncio.gather(*(box.files.download(f"/big{i}", tmp_path / f"b{i}") for i in range(4)))
    watching.cancel()
    assert max(sizes) - before_kb < 128 << 10  # four of 48 MiB each way
    assert digest(tmp_path / "b3") == digest(source)
    await box.exec("rm -f /big*")


async def test_a_slow_source_has_all_the_time_it_needs(box: Sandbox) -> None:
    """(F08) Longer than any silence that an operation may have."""

    async def slow() -> AsyncIterator[bytes]:
        yield b"a"
        await asyncio.sleep(KEEPALIVE_S * 1.1)
        yield b"b"

    assert await box.files.write("/slow", slow()) == 2
    assert await box.files.read("/slow") == b"ab"


async def test_a_write_of_a_client_that_broke_off_leaves_nothing(box: Sandbox) -> None:
    """(F01)"""
    await box.files.write("/cut/f", b"old")

    async def breaks() -> AsyncIterator[bytes]:
        yield b"x" * (1 << 20)
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError):
        await box.files.write("/cut/f", breaks())

    async def only_the_old_one() -> bool:
        return (await box.exec("ls", "-A", "/cut")).text == "f\n"

    await until(only_the_old_one, what="nothing beside it")
    assert await box.files.read("/cut/f") == b"old"


def _rss_kb(pid: int | None) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])
