"""One layer from a directory.

Owns: the walk (descriptors only, no link followed, one file system), holes,
xattrs, hard links, and proof that nothing changed while it was read. Does not
own: copies; files are read once, in the layer's order, where they are.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from shared.erofs.kernelmount import open_beneath
from shared.erofs.layertree import Extent, Inode, LayerTree
from shared.erofs.verify import data_spans, read_xattrs
from shared.errors import Conflict, InvalidRequest

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK

Stamp = tuple[int, int, int, int]


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(slots=True)
class _FileSource:
    """One file of the directory, opened when it is read and closed when it is done."""

    root_fd: int
    path: bytes
    stamp: Stamp
    fd: int = -1

    def open(self) -> int:
        if self.fd < 0:
            try:
                self.fd = open_beneath(self.root_fd, self.path, OPEN_FILE)
            except OSError as error:
                raise _changed(self.path, str(error)) from error
        return self.fd

    def pread(self, length: int, offset: int) -> bytes:
        data = os.pread(self.open(), length, offset)
        if length and not data:
            raise _changed(self.path, "it became shorter")
        return data

    def confirm(self) -> None:
        if self.fd >= 0 and _stamp(os.fstat(self.fd)) != self.stamp:
            raise _changed(self.path, "size or time differs")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _changed(path: bytes, why: str) -> Conflict:
    shown = path.decode(errors="backslashreplace")
    return Conflict(f"{shown!r} changed while it was imported: {why}", field="path")


@dataclass(slots=True)
class DirectoryLayer:
    """A directory as a layer; use as a context manager while its contents are read."""

    path: Path
    entries_max: int
    tree: LayerTree = field(init=False)
    _fd: int = -1
    _device: int = 0
    _count: int = 0
    _linked: dict[int, Inode] = field(default_factory=dict)
    _seen: str = ""

    def __enter__(self) -> DirectoryLayer:
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise InvalidRequest(f"{self.path}: {error.strerror}", field="path") from error
        try:
            self._seen = self._signature()
            self.tree = LayerTree(field="path")
            self._device = os.fstat(self._fd).st_dev
            self.tree.add(b"", self._inode(self._fd, b".", os.fstat(self._fd), b""))
            self._scan(self._fd, b"")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._fd = -1

    def confirm(self) -> None:
        """Raise :class:`Conflict` if any entry came, went or changed since the scan."""
        if self._signature() != self._seen:
            raise Conflict(f"{self.path} changed while it was imported", field="path")

    def _scan(self, fd: int, path: bytes) -> None:
        with os.scandir(fd) as entries:
            names = sorted(os.fsencode(entry.name) for entry in entries)
        for name in names:
            self._count += 1
            if self._count > self.entries_max:
                raise InvalidRequest(f"more than {self.entries_max} entries", field="path")
            self._add(fd, name, path + b"/" + name if path else name)

    def _add(self, fd: int, name: bytes, path: bytes) -> None:
        try:
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            known = self._linked.get(status.st_ino)
            inode = known if known is not None else self._inode(fd, name, status, path)
            self.tree.add(path, inode)
            # What is mounted in the tree is not part of it: such a directory stays empty.
            if inode.is_dir and status.st_dev == self._device:
                child_fd = os.open(name, OPEN_DIRECTORY, dir_fd=fd)
                try:
                    self._scan(child_fd, path)
                finally:
                    os.close(child_fd)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _changed(path, str(error)) from error

    def _inode(self, fd: int, name: bytes, status: os.stat_result, path: bytes) -> Inode:
        inode = Inode(
            status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            xattrs=read_xattrs(fd, name),
        )
        if inode.is_regular:
            self._content(inode, status, path)
        elif inode.is_link:
            inode.target = os.readlink(name, dir_fd=fd)
        elif inode.is_device:
            inode.rdev = status.st_rdev
        if not inode.is_dir and status.st_nlink > 1:
            self._linked[status.st_ino] = inode
        return inode

    def _content(self, inode: Inode, status: os.stat_result, path: bytes) -> None:
        source = _FileSource(self._fd, path, _stamp(status))
        inode.size, inode.source = status.st_size, source
        spans = [(0, status.st_size)] if status.st_size else []
        if status.st_blocks * 512 < status.st_size:
            try:
                spans = data_spans(source.open(), status.st_size)
            finally:
                source.close()
        inode.extents = tuple(Extent(start, end - start, start) for start, end in spans)

    def _signature(self) -> str:
        """A digest over what a change of any entry would alter."""
        digest = hashlib.sha256()
        stack = [b"."]
        while stack:
            path = stack.pop()
            try:
                fd = open_beneath(self._fd, path, OPEN_DIRECTORY)
            except OSError as error:
                raise _changed(path, str(error)) from error
            try:
                stack.extend(self._sign_directory(fd, path, digest))
            finally:
                os.close(fd)
        return digest.hexdigest()

    def _sign_directory(self, fd: int, path: bytes, digest: hashlib._Hash) -> list[bytes]:
        below = []
        device = os.fstat(fd).st_dev
        with os.scandir(fd) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = os.fsencode(entry.name)
                status = entry.stat(follow_symlinks=False)
                digest.update(path + b"/" + name + repr(_stamp(status)).encode())
                if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
                    below.append(path + b"/" + name)
        return below
