"""A mounted layer as an OCI layer tar.

Owns: names, types, owners, nanosecond times, xattrs, hard links, holes, whiteouts and
opaque directories in the form that container tools read. Does not own: mounts, the
archive around it. Sockets are left out, as tar has no form for them.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO, Any

from services.imagesvc.tarlayer import SPARSE_NAME_KEYWORD, TAR_TYPES, XATTR_KEYWORD
from shared.erofs.layertree import (
    OPAQUE_XATTR,
    OVERLAY_XATTR_PREFIX,
    WHITEOUT_OPAQUE,
    WHITEOUT_PREFIX,
)
from shared.erofs.verify import data_spans, read_xattrs
from shared.errors import Unsupported

READ_BYTES = 1024 * 1024
SPARSE_MIN_BYTES = 1024 * 1024
"""Holes of a file that are worth a map of its data."""
SPARSE_NAME = "GNUSparseFile.0/file"
"""For readers that know no maps; plain and short, so that no other record names the file."""
TYPES = {kind: letter for letter, kind in TAR_TYPES.items()}


def pack(root_fd: int, out: IO[bytes], *, tick: Callable[[int], None]) -> None:
    """Writes the layer whose root is open as ``root_fd``; ``tick`` is told of bytes done
    and may raise to cancel. Raises ``Unsupported`` naming what a tar cannot hold."""
    with tarfile.open(
        fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, encoding="utf-8",
        errors="surrogateescape",
    ) as tar:  # fmt: skip
        packer = _Packer(tar, tick)
        packer.entry(root_fd, b".", b".", os.fstat(root_fd))
        packer.folder(root_fd, b"")


@dataclass(slots=True)
class _Packer:
    tar: tarfile.TarFile
    tick: Callable[[int], None]
    _linked: dict[int, str] = field(default_factory=dict)

    def folder(self, fd: int, path: bytes) -> None:
        for name in sorted(os.fsencode(entry) for entry in os.listdir(fd)):
            below = path + b"/" + name if path else name
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            self.tick(0)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                self._mark(path, WHITEOUT_PREFIX + name)
                continue
            if name.startswith(WHITEOUT_PREFIX):
                raise Unsupported(f"{_text(below)!r}: such names are deletions in an OCI layer")
            if stat.S_ISSOCK(status.st_mode):
                continue
            self.entry(fd, name, below, status)
            if stat.S_ISDIR(status.st_mode):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
                child = os.open(name, flags, dir_fd=fd)
                try:
                    self.folder(child, below)
                finally:
                    os.close(child)

    def entry(self, fd: int, name: bytes, path: bytes, status: os.stat_result) -> None:
        info = _header(path, status)
        xattrs = read_xattrs(fd, name)
        if not stat.S_ISDIR(status.st_mode) and status.st_nlink > 1:
            first = self._linked.setdefault(status.st_ino, info.name)
            if first != info.name:
                info.type, info.linkname = tarfile.LNKTYPE, first
                self.tar.addfile(info)
                return
        _add_xattrs(info, xattrs)
        if stat.S_ISLNK(status.st_mode):
            info.linkname = _text(os.readlink(name, dir_fd=fd))
        if stat.S_ISREG(status.st_mode):
            self._content(fd, name, info)
        else:
            self.tar.addfile(info)
        if xattrs.get(OPAQUE_XATTR) == b"y":
            self._mark(path, WHITEOUT_OPAQUE)

    def _mark(self, folder: bytes, name: bytes) -> None:
        path = folder + b"/" + name if folder not in (b"", b".") else name
        self.tar.addfile(tarfile.TarInfo(_text(path)))

    def _content(self, fd: int, name: bytes, info: tarfile.TarInfo) -> None:
        opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        with open(opened, "rb"):
            spans = data_spans(opened, info.size)
            held = sum(end - start for start, end in spans)
            if info.size - held < SPARSE_MIN_BYTES:
                reader = _Spans(opened, [(0, info.size)], b"")
            else:
                parts = _sparse(info, spans)
                reader = _Spans(opened, [(-len(parts), 0), *spans], parts)
            self.tar.addfile(info, _Told(reader.read, self.tick))  # type: ignore[arg-type]


def _header(path: bytes, status: os.stat_result) -> tarfile.TarInfo:
    info = tarfile.TarInfo(_text(path))
    info.mode = stat.S_IMODE(status.st_mode)
    info.uid, info.gid = status.st_uid, status.st_gid
    whole, part = divmod(abs(status.st_mtime_ns), 1_000_000_000)
    info.mtime = -whole if status.st_mtime_ns < 0 else whole
    if part:
        sign = "-" if status.st_mtime_ns < 0 else ""
        info.pax_headers = {"mtime": f"{sign}{whole}.{part:09d}"}
    info.type = TYPES.get(stat.S_IFMT(status.st_mode), tarfile.REGTYPE)
    if stat.S_ISREG(status.st_mode):
        info.size = status.st_size
    elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
        info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return info


def _add_xattrs(info: tarfile.TarInfo, xattrs: dict[bytes, bytes]) -> None:
    found = dict(info.pax_headers)
    for key, value in xattrs.items():
        if key.startswith(OVERLAY_XATTR_PREFIX):
            continue
        if b"=" in key:
            raise Unsupported(f"{info.name!r}: an xattr named {key!r}")
        found[XATTR_KEYWORD + _text(key)] = _text(value)
    info.pax_headers = found


def _sparse(info: tarfile.TarInfo, spans: list[tuple[int, int]]) -> bytes:
    """Turns ``info`` into the header of a file with a map (GNU's format 1.0), which it
    returns: the map comes before the data."""
    numbers = [len(spans), *(n for start, end in spans for n in (start, end - start))]
    head = "".join(f"{number}\n" for number in numbers).encode()
    head += bytes(-len(head) % tarfile.BLOCKSIZE)
    info.pax_headers = dict(info.pax_headers) | {
        "GNU.sparse.major": "1", "GNU.sparse.minor": "0",
        SPARSE_NAME_KEYWORD: info.name, "GNU.sparse.realsize": str(info.size),
    }  # fmt: skip
    info.name = SPARSE_NAME
    info.size = len(head) + sum(end - start for start, end in spans)
    return head


@dataclass(slots=True)
class _Spans:
    """Reads ``head`` and then the parts of a file that hold data."""

    fd: int
    spans: list[tuple[int, int]]
    head: bytes

    def read(self, length: int) -> bytes:
        if not self.spans:
            return b""
        start, end = self.spans[0]
        wanted = min(length, end - start)
        if start < 0:
            piece = self.head[len(self.head) + start :][:wanted]
        else:
            piece = os.pread(self.fd, wanted, start)
        start += len(piece)
        self.spans[0] = (start, end)
        if start == end or not piece:
            del self.spans[0]
        return piece


@dataclass(slots=True)
class _Told:
    """A file for ``tarfile``, which reads exactly what it asks for."""

    source: Callable[[int], Any]
    tick: Callable[[int], None]

    def read(self, length: int) -> bytes:
        data = b""
        while len(data) < length and (piece := self.source(min(READ_BYTES, length - len(data)))):
            self.tick(len(piece))
            data += piece
        return data


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")
