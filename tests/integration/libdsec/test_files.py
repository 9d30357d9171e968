"""Files over a real server."""

from __future__ import annotations

import asyncio
import hashlib
import resource
from pathlib import Path

import pytest

from libdsec import (
    FileIsADirectory,
    FileNotADirectory,
    FileNotFound,
    NotFound,
    Sandbox,
)

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("size", [0, 1, 17 << 10, (18 << 10) + 1, 64 << 10, 1 << 20, 64 << 20])
async def test_what_is_written_is_read(sandbox: Sandbox, size: int):
    """(F01)"""
    data = (b"0123456789abcde\n" * (size // 16 + 1))[:size]
    assert await sandbox.files.write("/w/f", data) == size
    back = await sandbox.files.read("/w/f")
    assert hashlib.sha256(back).digest() == hashlib.sha256(data).digest()
    assert await sandbox.files.read("/w/f", offset=3, length=5) == data[3:8]


async def test_any_name_is_a_name(sandbox: Sandbox):
    """(F02)"""
    name = '/tmp/é🤣 "q".txt'
    await sandbox.files.write(name, "x")
    assert await sandbox.files.read(name, text=True) == "x"
    assert [e.name for e in await sandbox.files.list("/tmp")] == ['é🤣 "q".txt']


async def test_the_small_verbs(sandbox: Sandbox):
    files = sandbox.files
    await files.mkdir("/a/b")
    await files.write("/a/b/c", "one\r\n")
    await files.append("/a/b/c", "two")
    assert await files.read("/a/b/c") == b"one\r\ntwo"
    await files.move("/a/b/c", "/a/d")
    assert await files.exists("/a/d")
    assert not await files.exists("/a/b/c")
    assert (await files.stat("/a/d")).size == 8
    assert [e.path for e in await files.list("/", recursive=True)] == ["/a", "/a/b", "/a/d"]
    await files.remove("/a/d")
    assert not await files.exists("/a/d")


async def test_errors_are_typed_builtin_and_name_the_path(sandbox: Sandbox):
    with pytest.raises(FileNotFound, match="/no/such") as caught:
        await sandbox.files.read("/no/such")
    assert isinstance(caught.value, NotFound | FileNotFoundError)
    assert (caught.value.filename, caught.value.path) == ("/no/such", "/no/such")
    await sandbox.files.mkdir("/dir")
    with pytest.raises(FileIsADirectory):
        await sandbox.files.read("/dir")
    await sandbox.files.write("/file", "x")
    with pytest.raises(FileNotADirectory):
        await sandbox.files.list("/file/x")
    with pytest.raises(IsADirectoryError):
        await sandbox.files.write("/dir", "x")


async def test_files_stream_in_bounded_memory(sandbox: Sandbox, tmp_path: Path):
    """(F08)"""
    local, back = tmp_path / "big", tmp_path / "back"
    with local.open("wb") as sink:
        sink.truncate(200 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await asyncio.gather(*(sandbox.files.upload(local, f"/big{i}") for i in range(2)))
    counts: list[int] = []
    assert await sandbox.files.download("/big0", back, on_progress=counts.append) == 200 << 20
    grown_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert back.stat().st_size == 200 << 20 == sum(counts)
    assert grown_kb < 150 << 10


async def test_a_failed_download_leaves_no_file(sandbox: Sandbox, tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        await sandbox.files.download("/missing", tmp_path / "x")
    assert list(tmp_path.glob("x*")) == []


async def test_a_cancelled_upload_ends(sandbox: Sandbox, tmp_path: Path):
    local = tmp_path / "big"
    with local.open("wb") as sink:
        sink.truncate(1 << 30)
    uploading = asyncio.create_task(sandbox.files.upload(local, "/big"))
    await asyncio.sleep(0.1)
    uploading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert (await sandbox.exec("echo fine")).text == "fine\n"
