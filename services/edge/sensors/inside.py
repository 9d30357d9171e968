"""Paths inside a sandbox, opened from outside without following what is not its own.

Owns: the calls. Does not own: whose process it is (the driver).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_SYS_OPENAT2 = 437
_AT_EMPTY_PATH, _MOUNT_ROOT = 0x1000, 0x2000
_STATX_BYTES, _ATTRIBUTES_AT, _MOUNT_AT, _WITH_MOUNT = 256, 8, 0x90, 0x1000
_IN_ROOT, _NO_MAGIC = 0x10, 0x02
_HOW = struct.Struct("<QQQ")
FIND_TRIES = 10_000
"""The kernel refuses a way that goes up while anything anywhere is renamed or mounted, and
says that it is to be tried again."""


def root_of(pid: int) -> int:
    """The root of a process, as a descriptor. Raises ``OSError``."""
    return os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def find(root: int, path: str, *, link: bool = False) -> int:
    """What ``path`` is in ``root``, its links followed there (the last one not, where
    ``link``); as a descriptor that reads nothing. Raises ``OSError``."""
    flags = os.O_PATH | os.O_CLOEXEC | (os.O_NOFOLLOW if link else 0)
    how = _HOW.pack(flags, 0, _IN_ROOT | _NO_MAGIC)
    err = 0
    for _ in range(FIND_TRIES):
        fd: int = _libc.syscall(_SYS_OPENAT2, root, os.fsencode(path), how, len(how))
        if fd >= 0:
            return fd
        err = ctypes.get_errno()
        if err != errno.EAGAIN:
            break
    raise OSError(err, os.strerror(err), path)


def is_laid_over(at: int) -> bool:
    """Whether the descriptor is of the root of its mount. Raises ``OSError``."""
    (attributes,) = struct.unpack_from("<Q", _stat(at), _ATTRIBUTES_AT)
    return bool(attributes & _MOUNT_ROOT)


def mount_of(at: int) -> int:
    """The number of the mount that a descriptor came through. No other has it while it is
    there. Raises ``OSError``."""
    (mount,) = struct.unpack_from("<Q", _stat(at), _MOUNT_AT)
    return int(mount)


def _stat(at: int) -> bytes:
    room = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(at, b"", _AT_EMPTY_PATH, _WITH_MOUNT, room):
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))
    return room.raw
