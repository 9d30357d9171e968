"""Whole directories into and out of a real container, and what breaks in the middle."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from libdsec import (
    DSecError,
    FileIsADirectory,
    FilePermissionDenied,
    InvalidRequest,
    NotARegularFile,
    Sandbox,
)

pytestmark = [pytest.mark.docker]

LARGE_BYTES = 3 << 20
MANY = 10_000


def made(root: Path) -> Path:
    """A directory with everything that a tree carries."""
    (root / "empty").mkdir(parents=True)
    (root / "deep/er/still").mkdir(parents=True)
    (root / "deep/er/still/f").write_text("deep")
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "secret").write_text("x")
    (root / "secret").chmod(0o600)
    (root / "zero").write_bytes(b"")
    (root / "large").write_bytes(os.urandom(LARGE_BYTES))
    (root / "link").symlink_to("deep/er/still/f")
    (root / "dangling").symlink_to("not/there")
    (root / "other name").hardlink_to(root / "run.sh")
    (root / os.fsdecode(b"no \xff utf-8")).write_text("raw")
    (root / "closed").mkdir()
    (root / "closed/f").write_text("in a read-only directory")
    (root / "closed").chmod(0o555)
    os.utime(root / "secret", ns=(10**18, 10**18 + 123_456_789))
    return root


def manifest(root: Path) -> dict[str, tuple[object, ...]]:
    """What a tree holds: kind, mode, content or target."""
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        name, facts = str(path.relative_to(root)), path.lstat()
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_dir():
            found[name] = ("dir", stat.S_IMODE(facts.st_mode))
        else:
            mode = stat.S_IMODE(facts.st_mode)
            found[name] = ("file", mode, facts.st_mtime_ns, path.read_bytes())
    return found


async def test_a_tree_comes_back_as_it_was(box: Sandbox, tmp_path: Path) -> None:
    """(F02) Modes, times, empty directories, links, several names of one file."""
    local, back = made(tmp_path / "in"), tmp_path / "out"
    done = await box.files.upload_tree(local, "/t1")
    assert (done.files, done.skipped) == (7, 0)
    ran = await box.exec("cd /t1 && ./run.sh && stat -c '%a %h' 'other name' && ls -la")
    assert ran.text.startswith("ran\n755 2\n"), ran.text
    again = await box.files.download_tree("/t1", back)
    assert manifest(back) == manifest(local)
    assert again.bytes == done.bytes
    assert (back / "run.sh").stat().st_ino == (back / "other name").stat().st_ino


async def test_what_is_there_already_is_not_sent_again(box: Sandbox, tmp_path: Path) -> None:
    local, back = made(tmp_path / "in"), tmp_path / "out"
    first = await box.files.upload_tree(local, "/t2")
    second = await box.files.upload_tree(local, "/t2")
    assert (second.files, second.bytes, second.skipped) == (0, 0, first.files)
    (local / "zero").write_text("now")
    assert (await box.files.upload_tree(local, "/t2")).files == 1
    assert (await box.files.upload_tree(local, "/t2", skip_same=False)).files == first.files
    await box.files.download_tree("/t2", back)
    (back / "large").unlink()
    (back / "secret").write_text("y")
    assert (await box.files.download_tree("/t2", back)).files == 2
    assert manifest(back) == manifest(local)


async def test_what_else_is_at_the_target_does_not_matter(box: Sandbox, tmp_path: Path) -> None:
    """Only what is copied is looked at: a target may be the root."""
    local = tmp_path / "in"
    (local / "home/agent").mkdir(parents=True)
    (local / "home/agent").chmod((await box.files.stat("/home/agent")).mode)
    (local / "home").chmod((await box.files.stat("/home")).mode)
    (local / "home/agent/f").write_text("x")
    await box.exec("mkdir -p /home/agent/closed/d && chmod 700 /home/agent/closed")
    assert (await box.files.upload_tree(local, "/", user="agent")).files == 1
    assert (await box.files.upload_tree(local, "/", user="agent")).skipped == 1


async def test_patterns_leave_names_out_on_both_ways(box: Sandbox, tmp_path: Path) -> None:
    local, back = tmp_path / "in", tmp_path / "out"
    for name in ("a.py", "b/a.pyc", "b/node_modules/x/y", "docs/build/z", "build/kept"):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text(name)
    os.mkfifo(local / "b/pipe")
    exclude = ["*.pyc", "node_modules", "docs/build", "pipe"]
    await box.files.upload_tree(local, "/t3", exclude=exclude)
    names = [f.path for f in await box.files.list("/t3", recursive=True) if f.type == "file"]
    assert names == ["/t3/a.py", "/t3/build/kept"]
    await box.files.download_tree("/t3", back, exclude=["build"])
    assert [p.name for p in back.rglob("*") if p.is_file()] == ["a.py"]


async def test_ten_thousand_small_files_go_there_and_back(box: Sandbox, tmp_path: Path) -> None:
    local, back = tmp_path / "in", tmp_path / "out"
    for i in range(MANY):
        folder = local / f"d{i % 100}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"f{i}").write_text(f"{i}\n" * (i % 50))
    counts: list[int] = []
    done = await box.files.upload_tree(local, "/t4", on_progress=counts.append)
    assert (done.files, done.bytes) == (MANY, sum(counts))
    assert len(await box.files.list("/t4", recursive=True)) == MANY + 100
    assert (await box.files.download_tree("/t4", back)).files == MANY
    assert manifest(back) == manifest(local)


async def test_a_failure_names_the_path_and_leaves_no_half_file(
    box: Sandbox, tmp_path: Path
) -> None:
    local = tmp_path / "in"
    (local / "a").mkdir(parents=True)
    (local / "a/f").write_text("new")
    await box.exec("mkdir -p /t5/a/f /t6/a && chown -R nobody /t6 && mkdir /t7 && mkfifo /t7/a")
    with pytest.raises(FileIsADirectory, match="/t5/a/f"):
        await box.files.upload_tree(local, "/t5")
    with pytest.raises(FilePermissionDenied, match="/t6/a/f") as caught:
        await box.files.upload_tree(local, "/t6", user="agent")
    assert caught.value.path == "/t6/a/f"
    (local / "a/f").unlink()
    (local / "a").rmdir()
    (local / "a").write_text("x")
    with pytest.raises(NotARegularFile, match="/t7/a"):
        await box.files.upload_tree(local, "/t7")
    left = await box.exec("find /t5 /t6 /t7 -name '.dsec*'")
    assert left.text == ""


async def test_special_files_are_refused_before_anything_is_sent(
    box: Sandbox, tmp_path: Path
) -> None:
    """(F04)"""
    local, back = tmp_path / "in", tmp_path / "out"
    local.mkdir()
    (local / "a").write_text("x")
    os.mkfifo(local / "b")
    with pytest.raises(NotARegularFile, match="in/b"):
        await box.files.upload_tree(local, "/t8")
    assert not await box.files.exists("/t8")
    await box.exec("mkdir /t9; echo x >/t9/a; mkfifo /t9/b; mknod /t9/c c 1 5")
    with pytest.raises(NotARegularFile, match=r"/t9/[bc]"):
        await box.files.download_tree("/t9", back)
    assert not back.exists()
    await box.files.download_tree("/t9", back, exclude=["b", "c"])
    with pytest.raises(NotARegularFile, match="in/b"):
        await box.files.upload(local / "b", "/t8")
    with pytest.raises(NotARegularFile, match="in/b"):
        await box.files.download("/t9/a", local / "b")
    assert stat.S_ISFIFO((local / "b").stat().st_mode)


async def test_links_out_of_a_downloaded_tree_are_refused_or_left_out(
    box: Sandbox, tmp_path: Path
) -> None:
    """(F06)"""
    await box.exec("mkdir -p /ta/s; ln -s / /ta/root; ln -s ../../x /ta/s/up; ln -s ../f /ta/s/ok")
    await box.exec("echo x >/ta/f")
    with pytest.raises(InvalidRequest) as caught:
        await box.files.download_tree("/ta", tmp_path / "none")
    assert caught.value.field == "outside_links" and not (tmp_path / "none").exists()
    done = await box.files.download_tree("/ta", tmp_path / "some", outside_links="skip")
    assert sorted(done.left_out) == ["root", "s/up"]
    assert set(manifest(tmp_path / "some")) == {"f", "s", "s/ok"}
    await box.files.download_tree("/ta", tmp_path / "all", outside_links="keep")
    assert os.readlink(tmp_path / "all/root") == "/"
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "some/s/ok").unlink()
    (tmp_path / "some/s").rmdir()
    (tmp_path / "some/s").symlink_to(outside)  # of whoever prepared the directory
    with pytest.raises(InvalidRequest, match="is a link"):
        await box.files.download_tree("/ta", tmp_path / "some", outside_links="skip")
    assert list(outside.iterdir()) == []


async def test_no_set_user_id_comes_out_of_a_sandbox(box: Sandbox, tmp_path: Path) -> None:
    """(F06)"""
    script = (
        "mkdir /tb; cp /bin/busybox /tb/su; chmod 6755 /tb/su; mkdir /tb/d; chmod 3777 /tb/d; "
        "head -c 300000 /dev/zero >/tb/big; chmod 4755 /tb/big"
    )
    await box.exec(script, check=True)
    await box.files.download_tree("/tb", tmp_path / "out")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "out").iterdir()}
    assert modes == {"su": 0o755, "big": 0o755, "d": 0o777}


async def test_a_tree_belongs_to_the_user_of_the_call(box: Sandbox, tmp_path: Path) -> None:
    """(F07)"""
    local = made(tmp_path / "in")
    await box.files.upload_tree(local, "/home/agent/project", user="agent")
    owners = await box.exec("find /home/agent/project ! -user agent")
    assert owners.text == ""
    ran = await box.exec("stat -c '%U %a' project/run.sh", cwd="/home/agent", user="agent")
    assert ran.text == "agent 755\n"


async def test_holes_stay_holes(box: Sandbox, tmp_path: Path) -> None:
    sparse, back = tmp_path / "sparse", tmp_path / "back"
    with sparse.open("wb") as sink:
        sink.write(b"head")
        sink.truncate(64 << 20)
    await box.files.upload(sparse, "/sparse")
    ran = await box.exec("stat -c %s /sparse; du -k /sparse | cut -f1; head -c 4 /sparse")
    size, used_k, head = ran.text.split("\n")
    assert (int(size), head) == (64 << 20, "head") and int(used_k) < 2048
    await box.files.download("/sparse", back)
    facts = back.stat()
    assert facts.st_size == 64 << 20 and facts.st_blocks * 512 < 2 << 20


async def test_extended_attributes_are_not_carried(box: Sandbox, tmp_path: Path) -> None:
    local, back = tmp_path / "in", tmp_path / "out"
    local.mkdir()
    (local / "f").write_text("x")
    try:
        os.setxattr(local / "f", "user.note", b"n")
    except OSError:
        pytest.skip("this file system has no extended attributes")
    await box.files.upload_tree(local, "/tc")
    await box.files.download_tree("/tc", back)
    assert os.listxattr(back / "f") == []


async def test_a_tree_that_broke_off_goes_on(box: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "in"
    for i in range(2000):
        (local / f"d{i % 9}").mkdir(parents=True, exist_ok=True)
        (local / f"d{i % 9}" / f"f{i}").write_bytes(b"x" * 4000)
    begun = asyncio.Event()
    copying = asyncio.create_task(
        box.files.upload_tree(local, "/td", on_progress=lambda _: begun.set())
    )
    await begun.wait()
    copying.cancel()
    await asyncio.gather(copying, return_exceptions=True)
    done = await box.files.upload_tree(local, "/td")
    assert done.skipped > 0 and done.skipped + done.files == 2000
    assert (await box.exec("find /td -name '.dsec*'")).text == ""
    count = await box.exec("find /td -type f -size -4001c -size +3999c | wc -l")
    assert count.text.strip() == "2000"


@pytest.mark.parametrize("name", ["../up", "/abs", "a/../../up", "", "x/.."])
async def test_names_that_climb_are_refused_inside_too(box: Sandbox, name: str) -> None:
    """(F06) A client that is not this one."""
    from libdsec._bundle import Entry, pack

    with pytest.raises(DSecError) as caught:
        data = pack(Entry("f", name, 0o644, content=b"x"))
        await box.files._calls.put("file_unpack", "/te/in", data)
    assert caught.value.code == "invalid_request"
    assert (await box.exec("find /te /abs /up -type f 2>/dev/null")).text == ""
