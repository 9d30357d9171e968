"""One inotify instance, through ctypes: names of files that go or are replaced.

Owns: watches on single files and links, reading events. Does not own: which files. It says
nothing of the process; fanotify would, but names such changes by handles that files of one
layer share between sandboxes.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import Unsupported

CONTENT, ATTRIBUTES, MOVED, DELETED = 0x2, 0x4, 0x800, 0x400
MASK = CONTENT | ATTRIBUTES | MOVED | DELETED
ARRIVED, MADE, GONE = 0x80, 0x100, 0x200
IN_FOLDER = ARRIVED | MADE | GONE
OVERFLOW, IGNORED = 0x4000, 0x8000
_META = struct.Struct("<iIII")
READ_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Change:
    """``watch`` is what :meth:`Watches.add` gave; ``name`` is of an entry of a folder."""

    watch: int
    mask: int
    name: str = ""


class Watches:
    """See the module. Raises ``Unsupported`` where the machine has no more of them."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise Unsupported(f"no inotify: {os.strerror(ctypes.get_errno())}", field="sensors")

    def add(self, at: int, mask: int = MASK) -> int:
        """Watches what the descriptor ``at`` is of. Raises ``OSError``."""
        path = f"/proc/self/fd/{at}".encode()
        watch: int = self._libc.inotify_add_watch(self.fd, path, mask)
        if watch < 0:
            err = ctypes.get_errno()
            raise OSError(err, os.strerror(err))
        return watch

    def remove(self, watch: int) -> None:
        """One that went with its file is fine."""
        self._libc.inotify_rm_watch(self.fd, watch)

    def read(self) -> list[Change]:
        """What is there, at most some 256."""
        try:
            data = os.read(self.fd, READ_BYTES)
        except BlockingIOError:
            return []
        return list(_changes(data))

    def close(self) -> None:
        os.close(self.fd)


def _changes(data: bytes) -> Iterator[Change]:
    at = 0
    while at < len(data):
        watch, mask, _, more = _META.unpack_from(data, at)
        name = data[at + _META.size : at + _META.size + more].split(b"\0")[0]
        at += _META.size + more
        yield Change(watch, mask, name.decode(errors="replace"))
