"""One fanotify group, through ctypes.

Owns: marks, reading events, their descriptors. Does not own: what is marked or what an
event means. Events are told after the fact: nobody waits for the reader, and where it is
too slow the kernel drops them and says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from services.edge.sensors.inside import mount_of
from shared.errors import Unsupported

OPEN, MODIFY, OVERFLOW, ON_FOLDERS = 0x20, 0x2, 0x4000, 0x40000000
_CLOEXEC, _NONBLOCK, _UNLIMITED_MARKS = 0x1, 0x2, 0x20
_ADD, _MOUNT = 0x1, 0x10
_META = struct.Struct("<IBBHQii")
_AT_FDCWD = -100
READ_BYTES = 64 * _META.size
"""Of one read: each of its events holds a descriptor until it is looked at."""


@dataclass(frozen=True, slots=True)
class Event:
    """``mount`` is the number of the mount through which it came, ``path`` where that was
    in the sandbox (or in the mount, where the sandbox is gone), ``pid`` as this machine
    counts. ``lost``: the kernel dropped some before this one, and this is none."""

    mask: int
    pid: int
    mount: int
    path: str
    lost: bool = False


class Group:
    """See the module. Raises ``Unsupported`` where there is no fanotify."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        flags = _CLOEXEC | _NONBLOCK | _UNLIMITED_MARKS
        self.fd: int = self._libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise Unsupported(f"no fanotify: {os.strerror(ctypes.get_errno())}", field="sensors")

    def mark(self, at: int, mask: int, *, mount: bool) -> None:
        """Watches what the descriptor ``at`` is of: its whole mount, or itself. A mark goes
        with what it is on. Raises ``OSError``."""
        path = f"/proc/self/fd/{at}".encode()
        failed = self._libc.fanotify_mark(
            self.fd, _ADD | (_MOUNT if mount else 0), ctypes.c_uint64(mask), _AT_FDCWD, path
        )
        if failed:
            err = ctypes.get_errno()
            raise OSError(err, os.strerror(err))

    def read(self) -> list[Event]:
        """What is there, at most some 64; none where nothing is."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        return list(_events(data))

    def close(self) -> None:
        """Takes all marks away."""
        os.close(self.fd)


def _events(data: bytes) -> Iterator[Event]:
    at = 0
    while at < len(data):
        size, _, _, _, mask, fd, pid = _META.unpack_from(data, at)
        at += size
        if fd < 0:
            yield Event(mask, pid, 0, "", lost=bool(mask & OVERFLOW))
            continue
        try:
            yield Event(mask, pid, mount_of(fd), _place(fd))
        finally:
            os.close(fd)


def _place(fd: int) -> str:
    with contextlib.suppress(OSError):
        return os.fsencode(os.readlink(f"/proc/self/fd/{fd}")).decode(errors="replace")
    return ""
