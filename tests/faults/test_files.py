"""Faults of files, seen by a client of the whole system on a real container."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import time
from pathlib import Path

import pytest

from libdsec import DSecError, Sandbox
from libdsec.errors import (
    FileNotADirectory,
    FileNotFound,
    FilePermissionDenied,
    NoSpaceLeft,
    NotARegularFile,
)
from tests.faults.conftest import HANG_S

pytestmark = [pytest.mark.docker]


@pytest.mark.parametrize("size", [0, 1, 17 << 10, (18 << 10) + 1, 64 << 10, 1 << 20, 64 << 20])
async def test_every_size_is_stored_whole(box: Sandbox, size: int) -> None:
    """(F01)"""
    data = random.Random(size).randbytes(size)
    assert await box.files.write("/w/f", data) == size
    ran = await box.exec("sha256sum", "/w/f")
    assert ran.text.split()[0] == hashlib.sha256(data).hexdigest()
    assert await box.files.read("/w/f") == data


async def test_a_write_that_does_not_fit_is_no_success(box: Sandbox) -> None:
    """(F01)"""
    for size in (64 << 10, 80 << 20):  # /dev/shm of a container has 64 MiB
        with pytest.raises(DSecError):
            await box.files.write("/dev/full", b"x" * size)
    room = int((await box.exec("df -k /dev/shm | awk 'END { print $4 }'")).text) << 10
    assert 0 < room < 80 << 20
    with pytest.raises(NoSpaceLeft):
        await box.files.write("/dev/shm/f", b"x" * (room + 1))
    await box.exec("rm -f /dev/shm/*")


@pytest.mark.parametrize(
    "name", ['é🤣 "q".txt', "a\nb", "-rf", "x" * 255, "'; rm -rf *", " ", "a%2Fb", "\u202eexe"]
)
async def test_every_name_goes_there_and_back(box: Sandbox, name: str, tmp_path: Path) -> None:
    """(F02)"""
    path = f"/tmp/names/{name}"
    await box.files.write(path, name)
    assert await box.files.read(path, text=True) == name
    assert path in [f.path for f in await box.files.list("/tmp/names")]
    await box.files.download_tree("/tmp/names", tmp_path)
    assert (tmp_path / name).read_text() == name
    await box.files.upload(tmp_path / name, f"{path[:200]}.back")
    assert await box.files.read(f"{path[:200]}.back", text=True) == name
    await box.files.remove("/tmp/names", recursive=True)


async def test_what_is_no_regular_file_is_refused_and_stalls_nobody(box: Sandbox) -> None:
    """(F04)"""
    script = "cd /w 2>/dev/null || mkdir /w && cd /w; mkfifo p; ln -s /dev/zero z; ln -s p l"
    await box.exec(script + "; (nc -l -U s 2>/dev/null &)")
    await box.files.write("/w/regular", b"content")

    async def refused(path: str, write: bool) -> float:
        began = time.monotonic()
        with pytest.raises(NotARegularFile):
            await (box.files.write(path, b"x") if write else box.files.read(path))
        return time.monotonic() - began

    async def beside() -> float:
        began = time.monotonic()
        assert await box.files.read("/w/regular") == b"content"
        return time.monotonic() - began

    paths = ("/w/p", "/w/z", "/w/l", "/dev/zero", "/dev/tty")
    calls = [refused(path, write) for path in paths for write in (False, True)]
    spans = await asyncio.gather(*calls, *(beside() for _ in range(5)))
    assert max(spans) < HANG_S


async def test_links_lead_nowhere_outside(box: Sandbox) -> None:
    """(F06)"""
    outside = f"/tmp/dsec-escape-{os.getpid()}"
    await box.exec("mkdir -p /w; ln -sfn / /w/root; ln -sfn ../../../../../.. /w/up")
    for link in ("root", "up"):
        await box.files.write(f"/w/{link}{outside}.{link}", b"inside")
        assert await box.files.read(f"{outside}.{link}") == b"inside"
        assert not Path(f"{outside}.{link}").exists()
    with pytest.raises(DSecError) as caught:
        await box.files.read(f"/w/root{__file__}")
    assert caught.value.code == "not_found"


async def test_a_race_of_links_touches_nothing_outside(box: Sandbox) -> None:
    """(F06) A folder becomes a link and back while files are written below it."""
    name = f"dsec-race-{os.getpid()}"
    flip = (
        "i=0; while [ $i -lt 100000 ]; do mkdir -p /tmp/d; mv /tmp/d /tmp/e; "
        "ln -sfn / /tmp/d; rm /tmp/d; rm -rf /tmp/e; i=$((i+1)); done"
    )
    race = asyncio.create_task(box.exec(flip))
    codes: set[str] = set()

    async def write() -> None:
        for _ in range(100):
            try:
                await box.files.write(f"/tmp/d/tmp/{name}", b"x")
            except DSecError as exc:
                codes.add(exc.code)

    await asyncio.gather(*(write() for _ in range(4)))
    race.cancel()
    await asyncio.gather(race, return_exceptions=True)
    assert not Path("/tmp", name).exists()
    assert codes <= {"not_found", "invalid_request", "conflict"}


async def test_a_tree_from_a_sandbox_stays_where_it_is_put(box: Sandbox, tmp_path: Path) -> None:
    """(F06) Links in a downloaded tree are not followed on this side."""
    await box.exec("mkdir -p /t/sub; ln -sfn / /t/root; ln -sfn ../../.. /t/sub/up; echo x >/t/f")
    target = tmp_path / "in"
    await box.files.download_tree("/t", target, outside_links="keep")
    assert (target / "f").read_bytes() == b"x\n"
    found = {str(p.relative_to(target)) for p in target.rglob("*")}
    assert found <= {"f", "sub", "root", "sub/up"}
    assert [p.name for p in tmp_path.iterdir()] == ["in"]


RAW = os.fsdecode(b"not \xff\xfe utf-8")


async def test_names_that_are_no_text_work_everywhere(box: Sandbox, tmp_path: Path) -> None:
    """(F02) Any bytes but `/` and zero are a name."""
    files = box.files
    await files.mkdir(f"/raw/{RAW}.d")
    await files.write(f"/raw/{RAW}", b"content")
    await box.exec("ln", "-s", "nowhere", "/raw/link")
    await files.move(f"/raw/{RAW}", f"/raw/{RAW}.d/moved {RAW}")
    assert [f.path for f in await files.list("/raw", recursive=True)] == [
        "/raw/link", f"/raw/{RAW}.d", f"/raw/{RAW}.d/moved {RAW}",
    ]  # fmt: skip
    assert [f.path for f in await files.glob("/raw/**/moved*")] == [f"/raw/{RAW}.d/moved {RAW}"]
    assert await files.read(f"/raw/{RAW}.d/moved {RAW}") == b"content"
    await files.download(f"/raw/{RAW}.d/moved {RAW}", tmp_path / RAW)
    await files.upload(tmp_path / RAW, f"/raw/{RAW}.up")
    assert (await files.stat(f"/raw/{RAW}.up")).size == 7
    await files.remove(f"/raw/{RAW}.d", recursive=True)
    with pytest.raises(FileNotFoundError) as caught:
        await files.read(f"/raw/{RAW}.d")
    assert caught.value.errno == errno.ENOENT


async def test_owner_and_mode_are_the_calls(box: Sandbox) -> None:
    """(F07)"""
    await box.files.write("/home/agent/new/deep/x", b"x", user="agent", mode=0o755)
    ran = await box.exec("stat -c '%U %a' x . ..", cwd="/home/agent/new/deep")
    assert ran.text.split("\n")[:3] == ["agent 755", "agent 755", "agent 755"]
    await box.files.mkdir("/home/agent/open", user="agent", mode=0o2770)
    assert (await box.exec("stat -c '%U %a' /home/agent/open")).text == "agent 2770\n"
    await box.files.write("/home/agent/new/deep/x", b"y", user="agent")
    assert (await box.files.stat("/home/agent/new/deep/x")).mode == 0o755  # as it was


async def test_a_mode_that_cannot_be_set_fails_the_call(box: Sandbox) -> None:
    """(F07) The file of somebody else may be written to, its mode not be changed."""
    await box.exec("mkdir -p /others && echo old >/others/f && chmod 666 /others/f")
    await box.files.write("/others/f", b"new", user="agent")
    with pytest.raises(FilePermissionDenied, match="/others/f"):
        await box.files.write("/others/f", b"newer", user="agent", mode=0o600)
    assert (await box.files.stat("/others/f")).mode == 0o666


async def test_only_an_empty_directory_lists_empty(box: Sandbox) -> None:
    """(F10)"""
    await box.files.mkdir("/w/empty")
    assert await box.files.list("/w/empty") == []
    assert await box.files.list("/w/empty", recursive=True) == []
    for recursive in (False, True):
        with pytest.raises(FileNotFound, match="/nope"):
            await box.files.list("/nope", recursive=recursive)
        with pytest.raises(FileNotADirectory, match="/etc/passwd"):
            await box.files.list("/etc/passwd", recursive=recursive)
        with pytest.raises(FilePermissionDenied, match="/root"):
            await box.exec("chmod 700 /root")
            await box.files.list("/root", recursive=recursive, user="agent")
    with pytest.raises(FileNotFound, match="/nope"):
        async for _ in box.files.watch("/nope"):
            pytest.fail("there is nothing")
    with pytest.raises(FileNotFound, match="/nope"):
        await box.files.download_tree("/nope", "/tmp/never")


async def test_paths_begin_at_the_working_directory(box: Sandbox, tmp_path: Path) -> None:
    here = (await box.exec("pwd")).text.strip().rstrip("/")
    await box.files.write("relative/f", b"x")
    assert (await box.files.stat("relative/f")).path == f"{here}/relative/f"
    assert [f.path for f in await box.files.glob("relative/*")] == [f"{here}/relative/f"]
    await box.files.download_tree("relative", tmp_path / "out")
    assert (tmp_path / "out/f").read_bytes() == b"x"
    await box.files.upload_tree(tmp_path / "out", "relative/again")
    assert await box.files.read("relative/again/f") == b"x"
    await box.files.remove("relative", recursive=True)
