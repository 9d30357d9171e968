"""Directories copied file by file, with bounded concurrency.

Owns: walking, names that stay inside their root. Does not own: one file's transfer
(:mod:`libdsec.files`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from libdsec.errors import InvalidRequest
from libdsec.results import FileInfo

if TYPE_CHECKING:
    from libdsec.files import Files

CONCURRENT_FILES = 16

Progress = Callable[[int], None]


def walk(root: Path) -> Iterator[tuple[str, Path]]:
    """Directories (relative name, path) and files below ``root``, parents first.
    Linked directories are walked, each real one once. Raises ``InvalidRequest`` for
    a root that is no directory."""
    if not root.is_dir():
        raise InvalidRequest(f"{root} is no directory", field="local")
    seen: set[str] = set()
    for folder, dirs, files in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            dirs.clear()
            continue
        seen.add(real)
        for name in sorted([*dirs, *files]):
            path = Path(folder, name)
            yield path.relative_to(root).as_posix(), path


async def upload(
    files: Files, local: Path, remote: str, *, user: str | None, progress: Progress | None
) -> int:
    """Bytes written."""
    found = await asyncio.to_thread(lambda: list(walk(local)))
    await files.mkdir(remote, user=user)
    for name, path in found:
        if path.is_dir():
            await files.mkdir(f"{remote}/{name}", user=user)
    work = (
        lambda n=name, p=path: files.upload(p, f"{remote}/{n}", user=user, progress=progress)
        for name, path in found
        if path.is_file()
    )
    return await _bounded(work)


async def download(
    files: Files, remote: str, local: Path, *, user: str | None, progress: Progress | None
) -> int:
    """Bytes read. Links come last, so that nothing is written through one."""
    entries = [
        (inside(remote, entry.path), entry)
        for entry in await files.list(remote, recursive=True, user=user)
    ]
    local.mkdir(parents=True, exist_ok=True)
    for name, entry in entries:
        if entry.is_dir:
            _folder(local, name)
    work = (
        lambda n=name: files.download(
            f"{remote}/{n}", _target(local, n), user=user, progress=progress
        )
        for name, entry in entries
        if entry.type == "file"
    )
    count = await _bounded(work)
    for name, entry in entries:
        _link(local, name, entry)
    return count


def inside(root: str, path: str) -> str:
    """The name of ``path`` relative to ``root``. Raises ``InvalidRequest`` for one
    that leads out of it."""
    pure, base = PurePosixPath(path), PurePosixPath(root)
    if pure.is_relative_to(base):
        pure = pure.relative_to(base)
    elif pure.is_absolute():
        raise InvalidRequest(f"the sandbox names {path!r}, which is not in {root!r}")
    if not pure.parts or ".." in pure.parts:
        raise InvalidRequest(f"the sandbox names {path!r}, which is not in {root!r}")
    return pure.as_posix()


def _target(local: Path, name: str) -> Path:
    """Where ``name`` goes. Raises ``InvalidRequest`` if a link leads elsewhere."""
    target = local / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.parent.resolve().is_relative_to(local.resolve()):
        raise InvalidRequest(f"{target} is reached through a link out of {local}")
    return target


def _folder(local: Path, name: str) -> None:
    target = _target(local, name)
    if target.is_symlink():
        raise InvalidRequest(f"{target} is a link, not a directory")
    target.mkdir(parents=True, exist_ok=True)


def _link(local: Path, name: str, entry: FileInfo) -> None:
    if entry.type != "symlink" or entry.target is None:
        return
    target = _target(local, name)
    if not target.exists() and not target.is_symlink():
        target.symlink_to(entry.target)


async def _bounded(work: Iterable[Callable[[], Awaitable[int]]]) -> int:
    """Runs all, a bounded number at once; the first failure ends the rest."""
    gate, total = asyncio.Semaphore(CONCURRENT_FILES), 0

    async def one(start: Callable[[], Awaitable[int]]) -> None:
        nonlocal total
        try:
            count = await start()
            total += count
        finally:
            gate.release()

    try:
        async with asyncio.TaskGroup() as group:
            for start in work:
                await gate.acquire()
                group.create_task(one(start))
    except BaseExceptionGroup as group_error:
        raise group_error.exceptions[0] from None
    return total
