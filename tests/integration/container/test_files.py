"""Files in real containers: sizes, names, what is no file, links, owners."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from shared.errors import Forbidden, InvalidRequest, NotFound, QuotaExceeded
from tests.conformance.harness import listed, new_uid, run, until
from tests.integration.container.harness import ContainerHarness

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.docker]


async def pieces(data: bytes, size: int = 50_000) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]


async def read(
    driver: ContainerDriver, handle: Handle, path: str, user: str | None = None
) -> bytes:
    return b"".join([c async for c in driver.read(handle, path, user=user)])


@pytest.mark.parametrize("size", [0, 1, 17_000, 18_433, 65_536, 1 << 20, 64 << 20])
async def test_every_size_comes_back_whole(
    driver: ContainerDriver, sandbox: Handle, size: int
) -> None:
    """(F01)"""
    data = random.Random(size).randbytes(size)
    info = await driver.write(sandbox, "/w/f", pieces(data), user=None)
    assert info.size == size
    ran = await run(driver, sandbox, "sha256sum </w/f")
    assert ran.stdout.split()[0].decode() == hashlib.sha256(data).hexdigest()
    assert await read(driver, sandbox, "/w/f") == data


@pytest.mark.parametrize("name", ['é🤣 "q".txt', "a\nb", "-rf", "x" * 255, "'; rm -rf *"])
async def test_every_name_works(driver: ContainerDriver, sandbox: Handle, name: str) -> None:
    """(F02)"""
    await driver.write(sandbox, f"/tmp/names/{name}", pieces(b"data"), user=None)
    assert await read(driver, sandbox, f"/tmp/names/{name}") == b"data"
    found = await listed(driver, sandbox, "/tmp/names")
    assert f"/tmp/names/{name}" in [i.path for i in found]


async def test_what_is_no_regular_file_is_refused_at_once(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    """(F04)"""
    script = "mkdir -p /w; cd /w; mkfifo p; ln -s /dev/zero z; ln -s p l; echo ok >f"
    await run(driver, sandbox, script)
    for path in ("/w/p", "/w/z", "/w/l", "/dev/full", "/dev/ptmx"):
        with pytest.raises(InvalidRequest) as caught:
            await read(driver, sandbox, path)
        assert caught.value.details["errno"] == "ENOTREG"
        for append in (False, True):
            with pytest.raises(InvalidRequest) as caught:
                await driver.write(sandbox, path, pieces(b"x"), user=None, append=append)
            assert caught.value.details["errno"] == "ENOTREG"
    assert await read(driver, sandbox, "/w/f") == b"ok\n"


async def test_links_lead_nowhere_outside(
    driver: ContainerDriver, sandbox: Handle, tmp_path: Path
) -> None:
    """(F06)"""
    outside = Path("/tmp/dsec-escape-" + new_uid())
    await run(driver, sandbox, "mkdir -p /w; ln -s / /w/l; ln -s ../../../../.. /w/up")
    await driver.write(sandbox, f"/w/l{outside}", pieces(b"in"), user=None)
    await driver.write(sandbox, f"/w/up{outside}.2", pieces(b"in"), user=None)
    assert await read(driver, sandbox, str(outside)) == b"in"
    assert not outside.exists() and not Path(f"{outside}.2").exists()
    with pytest.raises(NotFound):
        await read(driver, sandbox, f"/w/l{Path(__file__)}")


async def test_a_race_of_links_touches_nothing_outside(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    """(F06)"""
    name = "dsec-race-" + new_uid()
    flip = (
        "while :; do mkdir -p /tmp/d; mv /tmp/d /tmp/e; ln -sfn / /tmp/d; "
        "rm /tmp/d; rm -rf /tmp/e; done"
    )
    race = asyncio.ensure_future(run(driver, sandbox, flip))
    for _ in range(150):
        try:
            await driver.write(sandbox, f"/tmp/d/tmp/{name}", pieces(b"x"), user=None)
        except (NotFound, InvalidRequest):
            continue
    race.cancel()
    await asyncio.gather(race, return_exceptions=True)
    assert not Path("/tmp", name).exists()


async def test_a_file_behind_a_link_is_replaced_and_the_link_stays(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    await run(driver, sandbox, "mkdir /w; echo old >/w/t; chmod 754 /w/t; ln -s t /w/l")
    await driver.write(sandbox, "/w/l", pieces(b"new"), user=None)
    ran = await run(driver, sandbox, "readlink /w/l; cat /w/t; stat -c %a /w/t")
    assert ran.stdout == b"t\nnew754\n"


async def test_owner_and_mode_are_the_users(harness: ContainerHarness) -> None:
    """(F07)"""
    handle = await harness.driver.start(harness.spec(uid=new_uid(), user="agent"))
    try:
        await harness.driver.write(handle, "/home/agent/a/b/x", pieces(b"x"), user=None, mode=0o755)
        ran = await run(
            harness.driver, handle,
            "stat -c '%U %G %a' /home/agent/a /home/agent/a/b /home/agent/a/b/x",
        )  # fmt: skip
        assert ran.stdout == b"agent agent 755\n" * 3
        with pytest.raises(Forbidden):
            await harness.driver.write(handle, "/etc/x", pieces(b"x"), user=None)
        await harness.driver.write(handle, "/root/r", pieces(b"x"), user="root", mode=0o600)
        with pytest.raises(Forbidden):
            await read(harness.driver, handle, "/root/r")
    finally:
        await harness.driver.stop(handle)


async def test_a_file_in_a_folder_of_somebody_else_is_written_in_its_place(
    harness: ContainerHarness,
) -> None:
    handle = await harness.driver.start(harness.spec(uid=new_uid(), user="agent"))
    try:
        await run(harness.driver, handle, "echo old >/etc/mine; chown agent /etc/mine", user="root")
        data = random.Random(1).randbytes(3 << 20)
        info = await harness.driver.write(handle, "/etc/mine", pieces(data), user=None)
        assert info.size == len(data)
        assert await read(harness.driver, handle, "/etc/mine") == data
        shorter = await harness.driver.write(
            handle, "/etc/mine", pieces(b"x"), user=None, mode=0o600
        )
        assert (shorter.size, shorter.mode) == (1, 0o600)
        left = await run(harness.driver, handle, "ls -A /tmp; ls -A /etc | grep dsec", user="root")
        assert left.stdout == b""
    finally:
        await harness.driver.stop(handle)


async def test_a_file_that_is_a_mount_point_is_written_in_its_place(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    data = b"127.0.0.1 localhost here\n"
    info = await driver.write(sandbox, "/etc/hosts", pieces(data), user=None)
    assert info.size == len(data)
    assert await read(driver, sandbox, "/etc/hosts") == data
    assert (await run(driver, sandbox, "ls -A /etc | grep dsec")).stdout == b""


async def test_listing_is_typed(driver: ContainerDriver, sandbox: Handle) -> None:
    """(F10)"""
    with pytest.raises(NotFound) as caught:
        await listed(driver, sandbox, "/nope")
    assert caught.value.details["errno"] == "ENOENT"
    with pytest.raises(NotFound) as caught:
        await listed(driver, sandbox, "/etc/passwd")
    assert caught.value.details["errno"] == "ENOTDIR"
    await driver.mkdir(sandbox, "/empty", user=None)
    assert await listed(driver, sandbox, "/empty") == []
    script = "cd /empty; mkfifo p; ln -s nowhere l; mkdir d; echo 12 >f"
    await run(driver, sandbox, script)
    found = await listed(driver, sandbox, "/empty")
    assert [(i.path, i.type, i.target) for i in found] == [
        ("/empty/d", "dir", None), ("/empty/f", "file", None),
        ("/empty/l", "symlink", "nowhere"), ("/empty/p", "fifo", None),
    ]  # fmt: skip


async def test_a_large_folder_is_listed_whole(driver: ContainerDriver, sandbox: Handle) -> None:
    await run(driver, sandbox, "mkdir /many; cd /many; for i in $(seq 3000); do : >n$i; done")
    assert len(await listed(driver, sandbox, "/many")) == 3000


async def test_a_folder_of_the_image_can_be_moved(driver: ContainerDriver, sandbox: Handle) -> None:
    await driver.move(sandbox, "/home", "/elsewhere", user=None)
    ran = await run(driver, sandbox, "ls -d /home; stat -c %U /elsewhere/agent")
    assert ran.stdout == b"agent\n"


async def test_files_and_commands_do_not_wait_for_each_other(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"x" * 10
        begun.set()
        await go.wait()
        yield b"x" * 10

    task = asyncio.ensure_future(driver.write(sandbox, "/slow", slow(), user=None))
    await begun.wait()
    assert (await run(driver, sandbox, "echo quick")).stdout == b"quick\n"
    assert not task.done()
    with pytest.raises(NotFound):
        await driver.stat(sandbox, "/slow", user=None)
    go.set()
    assert (await task).size == 20


def _writers(handle: Handle, folder: str) -> list[int]:
    """Host process ids of the sandbox's processes that have a file of ``folder`` open."""
    pids: list[int] = []
    for file in Path(handle.data["groups"]["v2"]).rglob("cgroup.procs"):
        with contextlib.suppress(OSError):  # a group may go meanwhile
            pids += map(int, file.read_text().split())
    return [p for p in pids if any(folder in _target(fd) for fd in _open_files(p))]


def _open_files(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


async def test_a_write_that_the_sandbox_killed_is_not_the_nodes_fault(
    driver: ContainerDriver, sandbox: Handle
) -> None:
    """As by its memory limit: a trainer must not mask the sample."""

    async def killed_midway() -> AsyncIterator[bytes]:
        yield b"begun"
        found: list[int] = []
        await until(lambda: bool(found) or found.extend(_writers(sandbox, "/killed")) or False)
        os.kill(found[0], signal.SIGKILL)
        yield b"and the rest"

    with pytest.raises(QuotaExceeded) as caught:
        await driver.write(sandbox, "/killed/f", killed_midway(), user=None)
    assert caught.value.field == "memory_limit_mb" and not caught.value.is_infra
    assert (await run(driver, sandbox, "true")).outcome.exit_code == 0
