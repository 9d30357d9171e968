"""Files inside a sandbox, as the port's prose promises them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.edge.agent import client
from services.edge.drivers.base import Driver, Handle
from services.edge.drivers.files import Files
from shared.errors import Conflict, DsecError, Forbidden, InvalidRequest, NotFound
from tests.conformance.harness import HANG_S, listed, run

pytestmark = pytest.mark.asyncio(loop_scope="module")

BREAKS = 30


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def content(files: Files, handle: Handle, path: str, **how: object) -> bytes:
    return b"".join([c async for c in files.read(handle, path, user=None, **how)])  # type: ignore[arg-type]


@pytest.fixture
def files(driver: Driver) -> Files:
    if not isinstance(driver, Files):
        pytest.skip(f"driver {driver.name} has no files")
    return driver


async def test_what_is_written_is_read(files: Files, sandbox: Handle) -> None:
    info = await files.write(sandbox, "/w/deep/f", chunks(b"ab", b"c"), user=None, mode=0o640)
    assert (info.type, info.size, info.mode, info.path) == ("file", 3, 0o640, "/w/deep/f")
    assert await content(files, sandbox, "/w/deep/f") == b"abc"
    assert await content(files, sandbox, "/w/deep/f", offset=1, length=1) == b"b"


async def test_append_adds(files: Files, sandbox: Handle) -> None:
    await files.write(sandbox, "/a", chunks(b"1"), user=None)
    info = await files.write(sandbox, "/a", chunks(b"2"), user=None, append=True)
    assert info.size == 2 and await content(files, sandbox, "/a") == b"12"


async def test_an_input_that_breaks_off_leaves_the_old_file(
    files: Files, sandbox: Handle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b"new"
        raise RuntimeError("the source broke")

    monkeypatch.setattr(client, "KILL_WAIT_S", 10 * HANG_S)
    await files.write(sandbox, "/tmp/keep/f", chunks(b"old"), user=None)
    for _ in range(BREAKS):  # it may break off before its process is known, and after
        with pytest.raises(RuntimeError):
            async with asyncio.timeout(HANG_S):  # its end is seen, not waited out
                await files.write(sandbox, "/tmp/keep/f", broken(), user=None)
    assert await content(files, sandbox, "/tmp/keep/f") == b"old"
    assert [i.path for i in await listed(files, sandbox, "/tmp/keep")] == ["/tmp/keep/f"]


async def test_stat_list_move_remove(files: Files, sandbox: Handle) -> None:
    await files.mkdir(sandbox, "/m/n", user=None, mode=0o750)
    await files.write(sandbox, "/m/n/b", chunks(b"x"), user=None)
    await files.write(sandbox, "/m/n/a", chunks(), user=None)
    info = await files.stat(sandbox, "/m/n", user=None)
    assert (info.type, info.mode) == ("dir", 0o750)
    found = await listed(files, sandbox, "/m/n")
    assert [(i.path, i.size) for i in found] == [("/m/n/a", 0), ("/m/n/b", 1)]
    await files.move(sandbox, "/m/n", "/m/o", user=None)
    with pytest.raises(InvalidRequest):
        await files.remove(sandbox, "/m/o", user=None)
    await files.remove(sandbox, "/m", user=None, recursive=True)
    with pytest.raises(NotFound):
        await files.stat(sandbox, "/m", user=None)


@pytest.mark.parametrize(
    ("path", "error", "errno"),
    [
        ("/nope", NotFound, "ENOENT"),
        ("/tmp", InvalidRequest, "EISDIR"),
        ("/etc/passwd/x", NotFound, "ENOTDIR"),
        ("/dev/zero", InvalidRequest, "ENOTREG"),
    ],
)
async def test_reading_what_cannot_be_read(
    files: Files, sandbox: Handle, path: str, error: type[DsecError], errno: str
) -> None:
    with pytest.raises(error) as caught:
        await content(files, sandbox, path)
    assert caught.value.field == "path" and caught.value.details["errno"] == errno


async def test_rights_are_the_users(files: Files, driver: Driver, sandbox: Handle) -> None:
    await files.write(sandbox, "/secret", chunks(b"s"), user="root", mode=0o400)
    with pytest.raises(Forbidden) as caught:
        async for _ in files.read(sandbox, "/secret", user="agent"):
            pass
    assert caught.value.details["errno"] == "EACCES"
    await files.write(sandbox, "/tmp/mine/f", chunks(b"m"), user="agent")
    ran = await run(driver, sandbox, "stat -c %U /tmp/mine /tmp/mine/f")
    assert ran.stdout == b"agent\nagent\n"


async def test_an_early_end_of_reading_ends_the_operation(
    files: Files, driver: Driver, sandbox: Handle
) -> None:
    await run(driver, sandbox, "head -c 50000000 /dev/zero >/tmp/big")
    async for _ in files.read(sandbox, "/tmp/big", user=None):
        break
    assert await content(files, sandbox, "/tmp/big", length=4) == b"\0" * 4


async def test_a_read_says_what_it_reads_and_goes_on_in_that_alone(
    files: Files, sandbox: Handle
) -> None:
    await files.write(sandbox, "/tmp/s", chunks(b"first"), user=None, mtime_ns=10**18)
    told: list[str] = []
    assert await content(files, sandbox, "/tmp/s", opened=told.append) == b"first"
    assert await content(files, sandbox, "/tmp/s", offset=2, source=told[0]) == b"rst"
    await files.write(sandbox, "/tmp/s", chunks(b"other"), user=None)
    with pytest.raises(Conflict) as caught:
        await content(files, sandbox, "/tmp/s", offset=2, source=told[0])
    assert caught.value.details["errno"] == "ESTALE"


async def test_a_listing_goes_below_where_it_is_asked_to(files: Files, sandbox: Handle) -> None:
    for name in ("a/b/c", "a/d", "e"):
        await files.write(sandbox, f"/tmp/l/{name}", chunks(b"x"), user=None)
    assert [i.path for i in await listed(files, sandbox, "/tmp/l")] == ["/tmp/l/a", "/tmp/l/e"]
    found = await listed(files, sandbox, "/tmp/l", recursive=True)
    assert [i.path for i in found] == [
        "/tmp/l/a", "/tmp/l/a/b", "/tmp/l/a/b/c", "/tmp/l/a/d", "/tmp/l/e",
    ]  # fmt: skip
