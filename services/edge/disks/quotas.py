"""Disks as project quotas of the node's own file system.

Owns: giving the folder of a sandbox a project of its own with limits. Does not own: whether
a quota is to be used (plan), the folder. Only on XFS: ext4 lets whoever has CAP_SYS_RESOURCE
write beyond a limit, and an overlay writes with the rights of who mounted it.

A project's number is on the folder itself, so it is found when nothing was noted of it. What
is counted for it XFS says by ``statvfs`` of the folder, as if it were a file system of that size.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from services.edge.disks.plan import MIB, Found, Room
from services.edge.machine import kernel
from shared.errors import Unavailable

GET_STATE, GET, SET_LIMITS = 0x5805, 0x5803, 0x5804
"""Of quotactl: the dialect that XFS speaks."""
STATE = struct.Struct("@xH76x")
ENFORCED: Final = 1 << 4 | 1 << 5
"""Projects are counted, and held to their limits."""
LIMITS = struct.Struct("@bbHI6Q56x")
"""version, flags, which limits, project; blocks hard and soft, inodes hard and soft, blocks
and inodes used. A block is 512 bytes."""
_VERSION, _PROJECTS, _HARD_LIMITS, _UNIT = 1, 2, 2 | 8, 512
_GET_XATTR, _SET_XATTR = 0x801C581F, 0x401C5820
_XATTR = struct.Struct("@5I8x")
_INHERIT: Final = 0x200
XFS: Final = 0x58465342
FIRST, LAST = 0x4000_0000, 0x7FFF_FFFF
"""Numbers of projects that administrators hardly use."""
ATTEMPTS: Final = 16

Call = Callable[[int, int, int, bytearray], None]
"""``quotactl_fd``: descriptor on the file system, command, project, what it takes and fills."""


class Quotas:
    """The projects of one driver. Thread-safe."""

    def __init__(self, folder: Path, call: Call = kernel.project_quota) -> None:
        """``folder``: on the file system on which the disks will be."""
        self._folder, self._call = folder, call
        self._lock = threading.Lock()

    def probe(self) -> Found:
        """Whether project quotas are in force there."""
        kind = kernel.file_system(self._folder)
        if kind != XFS:
            return Found(False, "project quotas are used on XFS only")
        state = bytearray(STATE.size)
        try:
            with _opened(self._folder) as fd:
                self._call(fd, GET_STATE, 0, state)
        except OSError as err:
            return Found(False, f"no project quotas: {err.strerror}")
        return judge_state(bytes(state))

    def make(self, folder: Path, room: Room) -> int:
        """Gives ``folder``, which is empty, a project with the limits; its number."""
        with self._lock, _opened(folder) as fd:
            for _ in range(ATTEMPTS):
                project = FIRST + secrets.randbelow(LAST - FIRST + 1)
                if self._free(fd, project):
                    break
            else:
                raise Unavailable("no project of the file system's quotas is free", field="disk")
            _mark(fd, project)
            self._call(fd, SET_LIMITS, project, limits_of(project, room))
        return project

    def drop(self, folder: Path) -> None:
        """The folder's project, if it has one of ours, has no limits any more: it is nobody's."""
        with _opened(folder) as fd:
            project = _marked(fd)
            if FIRST <= project <= LAST:
                self._call(fd, SET_LIMITS, project, limits_of(project, None))

    def _free(self, fd: int, project: int) -> bool:
        found = bytearray(LIMITS.size)
        try:
            self._call(fd, GET, project, found)
        except OSError as err:
            if err.errno in (errno.ENOENT, errno.ESRCH):  # never used
                return True
            raise
        return not any(LIMITS.unpack(found)[4:])


def judge_state(state: bytes) -> Found:
    """What the file system says of its quotas. Pure."""
    (flags,) = STATE.unpack(state)
    if flags & ENFORCED != ENFORCED:
        return Found(False, "project quotas are not in force (mount option prjquota)")
    return Found(True)


def limits_of(project: int, room: Room | None) -> bytearray:
    """Hard limits as the kernel takes them; ``None``: none. Pure."""
    blocks = room.disk_mb * MIB // _UNIT if room else 0
    inodes = room.inodes if room else 0
    packed = LIMITS.pack(
        _VERSION, _PROJECTS, _HARD_LIMITS, project, blocks, 0, inodes, 0, 0, 0
    )  # fmt: skip
    return bytearray(packed)


def project_of(path: Path) -> int:
    """The project that a file or folder counts for; 0 without. Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _marked(fd)
    finally:
        os.close(fd)


def _mark(fd: int, project: int) -> None:
    """What is made in the folder from now on counts for the project."""
    held = bytearray(_XATTR.size)
    fcntl.ioctl(fd, _GET_XATTR, held)
    flags, extent, extents, _, cow = _XATTR.unpack(held)
    fcntl.ioctl(fd, _SET_XATTR, _XATTR.pack(flags | _INHERIT, extent, extents, project, cow))


def _marked(fd: int) -> int:
    """The folder's project; 0 without, and where its file system knows none."""
    held = bytearray(_XATTR.size)
    try:
        fcntl.ioctl(fd, _GET_XATTR, held)
    except OSError:
        return 0
    return int(_XATTR.unpack(held)[3])


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
