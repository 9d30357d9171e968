"""Watching the files of a real container."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from libdsec import FileChange, FileNotFound, QuotaExceeded, Sandbox, Unsupported
from tests.e2e.conftest import until
from tests.faults.conftest import World, fake_args

pytestmark = [pytest.mark.docker]

WITHIN_S = 60.0
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH = 0x4206, 0x4207, 17
WALL = 0x40000000


class Seen:
    """What a watch told so far."""

    def __init__(self) -> None:
        self.changes: list[FileChange] = []
        self.error: BaseException | None = None
        self._new = asyncio.Event()

    def add(self, change: FileChange) -> None:
        self.changes.append(change)
        self._new.set()

    def pairs(self) -> list[tuple[str, str]]:
        return [(c.kind, c.path) for c in self.changes]

    async def until(self, kind: str, path: str) -> FileChange:
        """The first such change."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                for change in self.changes:
                    if (change.kind, change.path) == (kind, path):
                        return change
                self._new.clear()
                await self._new.wait()


@asynccontextmanager
async def watching(box: Sandbox, path: str, **how: object) -> AsyncIterator[Seen]:
    """A watch that has begun."""
    seen, ready = Seen(), asyncio.Event()

    async def follow() -> None:
        try:
            async for change in box.files.watch(path, ready=True, **how):  # type: ignore[arg-type]
                if change.kind == "ready":
                    ready.set()
                else:
                    seen.add(change)
        finally:
            ready.set()

    following = asyncio.create_task(follow())
    try:
        async with asyncio.timeout(WITHIN_S):
            await ready.wait()
        yield seen
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_changes_are_told_in_order_with_what_is_there(box: Sandbox) -> None:
    await box.files.write("/v/old", "x")
    async with watching(box, "/v") as seen:
        await box.exec("cd /v; mkdir d; echo yy >d/f; chmod 600 old; ln -s f d/l")
        await seen.until("created", "/v/d/l")
        await box.exec("cd /v; mv old d/new; rm d/f; rm -r d")
        await seen.until("deleted", "/v/d")
    pairs = seen.pairs()
    assert pairs.index(("created", "/v/d")) < pairs.index(("created", "/v/d/f"))
    assert pairs.index(("deleted", "/v/old")) < pairs.index(("created", "/v/d/new"))
    made = await seen.until("created", "/v/d/l")
    assert made.info is not None and (made.info.type, made.info.target) == ("symlink", "f")
    changed = await seen.until("modified", "/v/old")
    assert changed.info is not None and changed.info.mode == 0o600
    assert pairs.count(("created", "/v/d/f")) == 1
    assert (await seen.until("deleted", "/v/d/f")).info is None


async def test_files_of_the_image_are_watched_as_all_others(box: Sandbox) -> None:
    """They get a copy of their own with the first change."""
    async with watching(box, "/etc") as seen:
        await box.exec("echo x >>/etc/group; mv /etc/passwd /etc/p; mv /etc/p /etc/passwd")
        await seen.until("modified", "/etc/group")
        await seen.until("deleted", "/etc/p")
    assert ("created", "/etc/passwd") in seen.pairs()


async def test_what_is_short_lived_is_seen_too(box: Sandbox) -> None:
    await box.files.mkdir("/v2")
    async with watching(box, "/v2") as seen:
        await box.exec("touch /v2/short; rm /v2/short; touch /v2/end")
        await seen.until("created", "/v2/end")
    assert seen.pairs()[:2] == [("created", "/v2/short"), ("deleted", "/v2/short")]


async def test_nothing_in_new_directories_is_missed_or_told_twice(box: Sandbox) -> None:
    await box.files.mkdir("/v3")
    script = (
        "cd /v3; i=0; while [ $i -lt 60 ]; do mkdir -p d$i/a/b; echo x >d$i/f; "
        "echo x >d$i/a/f; echo x >d$i/a/b/f; i=$((i+1)); done; touch end"
    )
    async with watching(box, "/v3") as seen:
        await box.exec(script, check=True)
        await seen.until("created", "/v3/end")
        await seen.until("created", "/v3/d59/a/b/f")
    created = [p for k, p in seen.pairs() if k == "created"]
    wanted = {f"/v3/d{i}{s}" for i in range(60) for s in ("", "/f", "/a", "/a/f", "/a/b", "/a/b/f")}
    assert set(created) == wanted | {"/v3/end"}
    assert len(created) == len(set(created))
    assert not [p for k, p in seen.pairs() if k == "deleted"]


async def test_a_moved_directory_is_watched_under_its_new_name_alone(box: Sandbox) -> None:
    await box.exec("mkdir -p /v4/in/sub /v4/out /v4far")
    async with watching(box, "/v4/in") as seen:
        await box.exec("mv /v4/in/sub /v4/in/named; touch /v4/in/named/f")
        await seen.until("created", "/v4/in/named/f")
        await box.exec("mv /v4/in/named /v4/out/; touch /v4/out/named/g; touch /v4/in/end")
        await seen.until("created", "/v4/in/end")
    assert not [p for _, p in seen.pairs() if "/g" in p or "sub/f" in p]
    async with watching(box, "/v4/in", recursive=False) as seen:
        await box.exec("mkdir /v4/in/d; touch /v4/in/d/f; touch /v4/in/end2")
        await seen.until("created", "/v4/in/end2")
    assert "/v4/in/d/f" not in [p for _, p in seen.pairs()]


def watchers(path: str) -> list[int]:
    """The processes in whose root ``path`` is and that have an inotify, seen from outside."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(f"{folder}/root{path}").is_dir() and any(
                os.readlink(fd) == "anon_inode:inotify" for fd in (folder / "fd").iterdir()
            ):
                found.append(int(folder.name))
    return found


async def nobody_watches(path: str) -> None:
    """Returns once no process in whose root ``path`` is watches anything."""

    async def nobody() -> bool:
        return not watchers(path)

    await until(nobody, what="nobody watches")


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Keeps a process from running, by tracing it: from a stop its agent would wake it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def ptrace(request: int) -> None:
        if libc.ptrace(request, pid, None, None):
            raise OSError(ctypes.get_errno(), "ptrace")

    ptrace(PTRACE_SEIZE)
    try:
        ptrace(PTRACE_INTERRUPT)
        os.waitpid(pid, WALL)
        yield
    finally:
        ptrace(PTRACE_DETACH)


async def test_what_was_lost_is_told_as_an_overflow(box: Sandbox) -> None:
    """The kernel keeps a bounded number of changes for a reader that does not read."""
    await box.files.mkdir("/v5")
    await nobody_watches("/v5")  # any more: a watch that was closed ends a moment later
    limit = int((await box.exec("cat /proc/sys/fs/inotify/max_queued_events")).text)
    flood = (
        f"cd /v5; i=0; while [ $i -lt {limit + 100} ]; do : >f$i; i=$((i+1)); done; "
        "mkdir -p unseen/below"
    )
    async with watching(box, "/v5") as seen:
        (reader,) = watchers("/v5")
        with held(reader):
            await box.exec(flood, timeout=60, check=True)
        await seen.until("overflow", "/v5")
        await box.exec("touch /v5/unseen/below/f")  # it is watched all the same
        await seen.until("created", "/v5/unseen/below/f")
    await box.exec("rm -rf /v5")


async def test_too_many_directories_are_an_error_of_their_own(box: Sandbox) -> None:
    some = "mkdir $(seq 91)"
    script = f"cd /dev/shm; mkdir v6; cd v6; {some}; for i in *; do (cd $i; {some}); done"
    await box.exec(script, check=True)
    with pytest.raises(QuotaExceeded, match="/v6/") as caught:
        async for _ in box.files.watch("/dev/shm/v6"):
            pass
    assert caught.value.field == "path"
    async with watching(box, "/dev/shm/v6", recursive=False) as seen:
        await box.exec("touch /dev/shm/v6/f")
        await seen.until("created", "/dev/shm/v6/f")
    await box.exec("rm -rf /dev/shm/v6")


async def test_the_end_of_the_directory_ends_the_watch(box: Sandbox) -> None:
    """(F10)"""
    for end in ("rm -r /v7", "mv /v7 /v7gone"):
        await box.exec("mkdir -p /v7/d")
        changes = box.files.watch("/v7", ready=True)
        await anext(changes)
        await box.exec(end, check=True)
        with pytest.raises(FileNotFound, match="/v7"):
            async with asyncio.timeout(WITHIN_S):
                async for _ in changes:
                    pass


async def test_a_watch_that_is_closed_leaves_nothing_in_the_sandbox(box: Sandbox) -> None:
    await box.files.mkdir("/v8")
    await nobody_watches("/v8")
    async with watching(box, "/v8"), watching(box, "/v8"):
        assert len(watchers("/v8")) == 2
    await nobody_watches("/v8")


async def test_where_the_kernel_tells_nothing_a_look_now_and_then_does(world: World) -> None:
    """The backend `fake` has nobody who tells."""
    async with await world.client.create(fake_args()) as sandbox:
        await sandbox.files.write("/w/old", "x")
        async with watching(sandbox, "/w", interval=0.1) as seen:
            await sandbox.files.write("/w/new", "x")
            await seen.until("created", "/w/new")
            await sandbox.files.remove("/w/old")
            gone = await seen.until("deleted", "/w/old")
            assert gone.info is None
        with pytest.raises(Unsupported) as caught:
            await sandbox.files.upload_tree(".", "/tree", exclude=["*"])
        assert caught.value.field == "backend"
