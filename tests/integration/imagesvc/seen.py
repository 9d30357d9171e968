"""What a file system shows: manifests taken independently of the importer's own check."""

from __future__ import annotations

import gc
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from shared.blobs.folder import FolderStore
from shared.erofs.kernelmount import (
    FSCONFIG_CMD_CREATE,
    FSMOUNT_CLOEXEC,
    FSOPEN_CLOEXEC,
    MOUNT_ATTR_RDONLY,
    SYS_FSCONFIG,
    SYS_FSMOUNT,
    SYS_FSOPEN,
    mounted_layer,
    syscall,
)

FSCONFIG_SET_FD = 5


@dataclass(frozen=True)
class Entry:
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    size: int
    rdev: int
    links: tuple[bytes, ...]
    target: bytes
    xattrs: tuple[tuple[str, bytes], ...]
    sha256: str


def manifest(root: Path | int, *, hide_overlay: bool = False) -> dict[bytes, Entry]:
    """All entries below ``root`` (a path or a directory descriptor), by relative path."""
    top = b"/proc/self/fd/%d" % root if isinstance(root, int) else os.fsencode(root)
    found: dict[bytes, os.stat_result] = {}
    _walk(top, b"", found)
    names: dict[tuple[int, int], list[bytes]] = {}
    for path, status in found.items():
        if not stat.S_ISDIR(status.st_mode):
            names.setdefault((status.st_dev, status.st_ino), []).append(path)
    return {path: _entry(top, path, status, names, hide_overlay) for path, status in found.items()}


def _walk(top: bytes, path: bytes, found: dict[bytes, os.stat_result]) -> None:
    for name in sorted(os.listdir(top + b"/" + path)):
        below = path + b"/" + name if path else name
        status = found[below] = os.lstat(top + b"/" + below)
        if stat.S_ISDIR(status.st_mode):
            _walk(top, below, found)


def _entry(
    top: bytes,
    path: bytes,
    status: os.stat_result,
    names: dict[tuple[int, int], list[bytes]],
    hide_overlay: bool,
) -> Entry:
    full = top + b"/" + path
    regular, link = stat.S_ISREG(status.st_mode), stat.S_ISLNK(status.st_mode)
    xattrs = [
        (name, os.getxattr(full, name, follow_symlinks=False))
        for name in sorted(os.listxattr(full, follow_symlinks=False))
        if not (hide_overlay and name.startswith("trusted.overlay."))
    ]
    content = b""
    if regular:
        with open(full, "rb") as file:
            content = file.read()
    return Entry(
        mode=status.st_mode,
        uid=status.st_uid,
        gid=status.st_gid,
        mtime_ns=status.st_mtime_ns,
        size=status.st_size if regular else 0,
        rdev=status.st_rdev,
        links=tuple(names.get((status.st_dev, status.st_ino), ())),
        target=os.readlink(full) if link else b"",
        xattrs=tuple(xattrs),
        sha256=hashlib.sha256(content).hexdigest() if regular else "",
    )


@contextmanager
def mounted(store: FolderStore, layers: list[str]) -> Iterator[int]:
    """A descriptor on the root of ``layers`` (bottom first), composed as a node does it."""
    with ExitStack() as stack:
        roots = [
            stack.enter_context(mounted_layer(paths.meta, paths.data))
            for paths in map(store.paths, layers)
        ]
        if len(roots) == 1:
            yield roots[0]
            return
        mount = _overlay(roots)
        stack.callback(os.close, mount)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        root = os.open(f"/proc/self/fd/{mount}", flags)
        stack.callback(os.close, root)
        yield root


def _overlay(roots: list[int]) -> int:
    """A detached overlay mount of the layers' roots, bottom first."""
    context = syscall(SYS_FSOPEN, b"overlay", FSOPEN_CLOEXEC)
    try:
        for root in reversed(roots):
            syscall(SYS_FSCONFIG, context, FSCONFIG_SET_FD, b"lowerdir+", None, root)
        syscall(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, MOUNT_ATTR_RDONLY)
    finally:
        os.close(context)


def open_files() -> set[tuple[str, str]]:
    """Descriptors this process has open and what they are of. What others have forgotten is
    collected first: it might go at any moment, and its number to somebody else."""
    gc.collect()
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the listing itself
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found
