"""Listing, finding, watching and comparing files of a sandbox.

Owns: patterns, what counts as a change between two looks, the patch of a workspace. Does
not own: one file's operations (:mod:`libdsec.files`). Where the sandbox's kernel tells
no changes, watching polls: that misses what comes and goes between two looks.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import AsyncIterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import msgspec

from libdsec._filecalls import FileCalls, info_of, persistent
from libdsec._wire import FileEntry, FileEvent, FileReply, whole_name
from libdsec.errors import (
    ExecFailed,
    FileNotADirectory,
    FileNotFound,
    FilePermissionDenied,
    InvalidRequest,
    Unsupported,
)
from libdsec.results import FileChange, FileInfo

if TYPE_CHECKING:
    from libdsec.files import Files
    from libdsec.sandbox import Sandbox

ENTRIES = msgspec.json.Decoder(FileEntry)
EVENTS = msgspec.json.Decoder(FileEvent)
LISTS_AT_ONCE = 8
"""Directories that one call reads at the same time."""
DIFF_TIMEOUT_S = 120.0
NO_PROGRAM, NO_REPOSITORY, NO_BASE = 127, 97, 98
MAGIC = "*?["

# An index of our own, so that the workspace's stays as it is; settings of the workspace
# that would run programs or change the format are out of force.
DIFF = r"""
command -v git >/dev/null || exit 127
cd -- "$1" || exit 97
git() { command git -c safe.directory='*' -c core.fsmonitor=false -c core.quotePath=true "$@"; }
own=$(git rev-parse --absolute-git-dir 2>/dev/null) || exit 97
base=$2
if ! git rev-parse -q --verify "$base^{tree}" >/dev/null; then
  [ "$base" = HEAD ] || exit 98
  base=$(git hash-object -t tree /dev/null)
fi
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
[ ! -e "$own/index" ] || cp "$own/index" "$tmp/index" || exit 1
GIT_INDEX_FILE=$tmp/index
export GIT_INDEX_FILE
git add -A . >/dev/null || exit 1
git diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames \
  --src-prefix=a/ --dst-prefix=b/ --relative "$base" -- .
"""


async def glob(files: Files, pattern: str, *, user: str | None) -> list[FileInfo]:
    """What matches, sorted by path."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    if not parts or ".." in parts:
        raise InvalidRequest("a pattern names files and cannot hold `..`", field="pattern")
    start = "/" if pattern.startswith("/") else "."
    found: dict[str, FileInfo] = {}
    gate = asyncio.Semaphore(LISTS_AT_ONCE)

    async def entries(folder: str) -> list[FileInfo]:
        async with gate:
            try:
                return await files.list(folder, user=user)
            except (FileNotFound, FileNotADirectory, FilePermissionDenied):
                return []  # gone meanwhile, not a directory, or not to be seen

    async def match(folder: str, rest: Sequence[str]) -> None:
        head, tail = rest[0], rest[1:]
        if head != "**" and tail and not any(c in head for c in MAGIC):
            await match(posixpath.join(folder, head), tail)
            return
        below = await entries(folder)
        if head == "**":
            deeper = [match(e.path, rest) for e in below if e.is_dir]
            await asyncio.gather(*deeper, *([match(folder, tail)] if tail else []))
            found.update({} if tail else {e.path: e for e in below})
            return
        hits = [e for e in below if fnmatchcase(e.name, head)]
        if tail:
            await asyncio.gather(*(match(e.path, tail) for e in hits if e.type != "file"))
        else:
            found.update({e.path: e for e in hits})

    await match(start, parts)
    return [found[path] for path in sorted(found)]


async def entries(
    calls: FileCalls, path: str, *, recursive: bool, user: str | None
) -> list[FileInfo]:
    """What is in a directory, or below it, parents first, by name."""

    async def whole() -> list[FileEntry]:
        found: list[FileEntry] = []
        async for part in calls.output("file_list", path, recursive=recursive, user=user):
            if isinstance(part, FileReply):
                found += part.entries or []
            else:  # a frame holds whole lines
                found += ENTRIES.decode_lines(part)
        return found

    found = map(info_of, await persistent(whole))
    return sorted(found, key=lambda info: info.path.split("/"))


async def watch(
    files: Files, calls: FileCalls, path: str, *, recursive: bool, interval_s: float,
    user: str | None,
) -> AsyncIterator[FileChange]:  # fmt: skip
    """Changes below ``path``, as the kernel tells them where it can."""
    try:
        async for part in calls.output("file_watch", path, recursive=recursive, user=user):
            if isinstance(part, FileReply):
                break
            for event in EVENTS.decode_lines(part):
                info = None if event.entry is None else info_of(event.entry)
                kind: Any = event.change
                yield FileChange(kind, whole_name(event.path, event.raw_path), info)
    except Unsupported:
        looks = _looks(files, path, recursive=recursive, interval_s=interval_s, user=user)
        async for change in looks:
            yield change


async def _looks(
    files: Files, path: str, *, recursive: bool, interval_s: float, user: str | None
) -> AsyncIterator[FileChange]:
    """Changes below ``path``, one look every ``interval_s`` seconds."""
    before = await _seen(files, path, recursive=recursive, user=user)
    yield FileChange("ready", path)
    while True:
        await asyncio.sleep(interval_s)
        after = await _seen(files, path, recursive=recursive, user=user)
        for change in changes(before, after):
            yield change
        before = after


async def _seen(
    files: Files, path: str, *, recursive: bool, user: str | None
) -> dict[str, FileInfo]:
    """Path → facts. A directory that goes while it is read is no error: the next look
    is without it."""
    found: dict[str, FileInfo] = {}
    todo = [path]
    while todo:
        folder = todo.pop()
        try:
            below = await files.list(folder, user=user)
        except (FileNotFound, FileNotADirectory, FilePermissionDenied):
            if folder == path:
                raise
            continue
        found |= {entry.path: entry for entry in below}
        todo += [entry.path for entry in below if recursive and entry.is_dir]
    return found


def changes(before: dict[str, FileInfo], after: dict[str, FileInfo]) -> list[FileChange]:
    """What happened between two looks, by path; what is gone comes first. A directory
    is not modified by what happens in it."""
    gone = [FileChange("deleted", path) for path in before if path not in after]
    rest = []
    for path, info in after.items():
        old = before.get(path)
        if old is None or old.type != info.type:
            rest.append(FileChange("created", path, info))
        elif _facts(old) != _facts(info):
            rest.append(FileChange("modified", path, info))
    key = lambda change: change.path  # noqa: E731
    return sorted(gone, key=key) + sorted(rest, key=key)


def _facts(info: FileInfo) -> tuple[object, ...]:
    owner = (info.mode, info.uid, info.gid)
    return owner if info.is_dir else (*owner, info.size, info.mtime, info.target)


async def diff(
    sandbox: Sandbox, path: str, *, base: str, user: str | None, limit_bytes: int
) -> bytes:
    """The patch from ``base`` to what is there now."""
    if base.startswith("-"):
        raise InvalidRequest(f"{base!r} is no revision", field="base")
    argv = ("/bin/sh", "-c", DIFF, "sh", path, base)
    result = await sandbox.exec(
        *argv, user=user, timeout=DIFF_TIMEOUT_S, output_limit_bytes=limit_bytes
    )
    if result.exit_code == NO_PROGRAM:
        raise Unsupported(f"{path}: there is no git in the sandbox", field="path")
    if result.exit_code == NO_REPOSITORY:
        raise FileNotFound(f"{path}: not a git workspace", path=path)
    if result.exit_code == NO_BASE:
        raise InvalidRequest(f"{path}: there is no revision {base}", field="base")
    if not result.ok:
        raise ExecFailed(f"{path}: git: {result.stderr_text.strip()[-500:]}", result)
    if result.truncated[0]:
        text = f"{path}: the diff is larger than {limit_bytes} bytes"
        raise InvalidRequest(text, field="limit_bytes")
    return result.stdout
