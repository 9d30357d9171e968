"""Read-only EROFS mounts that no path leads to.

Owns: the few system calls for a detached mount of a layer. Does not own: what is
read through it. A detached mount leaves nothing behind when the process dies.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shared.errors import Unsupported

# One table for all architectures that Linux gave these numbers to (all since 5.1).
SYS_FSOPEN, SYS_FSCONFIG, SYS_FSMOUNT, SYS_OPENAT2 = 430, 431, 432, 437
FSOPEN_CLOEXEC = FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH = 0x2, 0x4, 0x8

_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_uint64] | None) -> int:
    """``syscall(2)``; raises :class:`OSError`."""
    boxed = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(_libc.syscall(ctypes.c_long(number), *boxed))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def open_beneath(root_fd: int, path: bytes, flags: int) -> int:
    """Open ``path`` below ``root_fd`` without following any link on the way."""
    how = (ctypes.c_uint64 * 3)(
        flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS
    )
    return syscall(SYS_OPENAT2, root_fd, path, how, ctypes.sizeof(how))


@contextmanager
def mounted_layer(meta_path: Path, data_path: Path | None) -> Iterator[int]:
    """A directory descriptor on the root of a layer, mounted while the context lasts.

    Raises :class:`Unsupported` where this machine can't mount EROFS files.
    """
    try:
        mount_fd = _mount(meta_path, data_path)
    except OSError as error:
        if error.errno in (errno.ENODEV, errno.EPERM, errno.ENOTBLK, errno.ENOSYS):
            raise Unsupported(f"this machine can't mount an EROFS file: {error}") from error
        raise
    try:
        # The mount lives as long as its own descriptor, which can't be listed itself.
        root_fd = os.open(f"/proc/self/fd/{mount_fd}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield root_fd
        finally:
            os.close(root_fd)
    finally:
        os.close(mount_fd)


def _mount(meta_path: Path, data_path: Path | None) -> int:
    context = syscall(SYS_FSOPEN, b"erofs", FSOPEN_CLOEXEC)
    try:
        source = os.fsencode(meta_path.resolve())
        syscall(SYS_FSCONFIG, context, FSCONFIG_SET_STRING, b"source", source, 0)
        if data_path is not None:
            device = os.fsencode(data_path.resolve())
            syscall(SYS_FSCONFIG, context, FSCONFIG_SET_STRING, b"device", device, 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_SET_FLAG, b"ro", None, 0)
        syscall(SYS_FSCONFIG, context, FSCONFIG_CMD_CREATE, None, None, 0)
        flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
        return syscall(SYS_FSMOUNT, context, FSMOUNT_CLOEXEC, flags)
    finally:
        os.close(context)
