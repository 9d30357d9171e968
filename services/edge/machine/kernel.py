"""The few system calls the edge needs that Python does not offer.

Owns: thin typed wrappers (new mount API, advice on another process's memory, swap, project
quotas). Does not own: what is mounted, advised, swapped to or limited.
Every wrapper raises ``OSError`` with the kernel's own text where there is one.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Self

# The same numbers on every architecture from 5.0 on.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_PROCESS_MADVISE = 440
_QUOTACTL_FD = 443

FSOPEN_CLOEXEC = 1
FSMOUNT_CLOEXEC = 1
FSCONFIG_SET_FLAG, FSCONFIG_SET_STRING, FSCONFIG_SET_FD, FSCONFIG_CMD_CREATE = 0, 1, 5, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
MADV_WILLNEED, MADV_PAGEOUT = 3, 21
_PROJECT_QUOTA = 2
SWAP_PREFER, SWAP_PRIORITY_MAX = 0x8000, 0x7FFF

_libc = ctypes.CDLL(None, use_errno=True)


def _syscall(number: int, *args: object) -> int:
    return _checked(int(_libc.syscall(ctypes.c_long(number), *args)))


def _checked(result: int) -> int:
    if result < 0:
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))
    return result


@dataclass(slots=True)
class FsContext:
    """A file system being configured; :meth:`mount` makes it a detached mount."""

    fd: int
    kind: str

    @classmethod
    def open(cls, kind: str) -> FsContext:
        return cls(_syscall(_FSOPEN, kind.encode(), ctypes.c_uint(FSOPEN_CLOEXEC)), kind)

    def _config(self, command: int, key: str | None, value: bytes | None, aux: int) -> None:
        try:
            _syscall(
                _FSCONFIG, ctypes.c_int(self.fd), ctypes.c_uint(command),
                key.encode() if key else None, value, ctypes.c_int(aux),
            )  # fmt: skip
        except OSError as err:
            said = self._log()
            text = f"{self.kind}: {key or 'create'}: {said or err.strerror}"
            raise OSError(err.errno, text) from None

    def _log(self) -> str:
        try:
            return os.read(self.fd, 1024).decode(errors="replace").strip()
        except OSError:
            return ""

    def set(self, key: str, value: str) -> None:
        self._config(FSCONFIG_SET_STRING, key, os.fsencode(value), 0)

    def set_fd(self, key: str, fd: int) -> None:
        self._config(FSCONFIG_SET_FD, key, None, fd)

    def set_flag(self, key: str) -> None:
        self._config(FSCONFIG_SET_FLAG, key, None, 0)

    def mount(self, attributes: int = 0) -> int:
        """The descriptor of a detached mount: it lives as long as the descriptor."""
        self._config(FSCONFIG_CMD_CREATE, None, None, 0)
        return _syscall(
            _FSMOUNT, ctypes.c_int(self.fd), ctypes.c_uint(FSMOUNT_CLOEXEC),
            ctypes.c_uint(attributes),
        )  # fmt: skip

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("length", ctypes.c_uint64)]


def process_madvise(pidfd: int, start: int, length: int, advice: int) -> int:
    """Advice on ``length`` bytes of another process's memory; the bytes it took."""
    vector = _IoVec(start, length)
    return _syscall(
        _PROCESS_MADVISE, ctypes.c_int(pidfd), ctypes.byref(vector), ctypes.c_size_t(1),
        ctypes.c_int(advice), ctypes.c_uint(0),
    )  # fmt: skip


def swapon(path: str, priority: int) -> None:
    """Swaps to a prepared device or file, before those of a lower ``priority``."""
    flags = SWAP_PREFER | (priority & SWAP_PRIORITY_MAX)
    _checked(_libc.swapon(os.fsencode(path), ctypes.c_int(flags)))


def swapoff(path: str) -> None:
    """Brings back all that was swapped there, then swaps there no more."""
    _checked(_libc.swapoff(os.fsencode(path)))


def project_quota(fd: int, command: int, project: int, data: bytearray) -> None:
    """A command on the project quotas of the file system that ``fd`` is on; ``data`` is what
    it takes and fills."""
    held = (ctypes.c_char * len(data)).from_buffer(data)
    _syscall(
        _QUOTACTL_FD, ctypes.c_uint(fd), ctypes.c_uint(command << 8 | _PROJECT_QUOTA),
        ctypes.c_uint(project), ctypes.byref(held),
    )  # fmt: skip


class _StatFs(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_long), ("rest", ctypes.c_long * 31)]


def file_system(path: os.PathLike[str]) -> int:
    """The magic number of the file system that ``path`` is on."""
    found = _StatFs()
    _checked(_libc.statfs(os.fsencode(path), ctypes.byref(found)))
    return int(found.kind)
