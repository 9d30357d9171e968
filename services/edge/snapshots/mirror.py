"""A copy of a sandbox's writable layer, brought up to date in passes.

Owns: the walk (descriptors only, no link followed), copies of contents with their holes,
owners, modes, times, xattrs, hard links, devices and overlay's own marks; what a later
pass may leave as it is. Does not own: when the sandbox stands still, what becomes of the
copy. Blocking; called in threads.

The first pass runs beside the workload and copies everything; the one that counts runs
while it stands still and copies what changed since, so that standing still costs a look
at each entry and not a copy of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from shared.erofs.kernelmount import open_beneath
from shared.erofs.layertree import TRANSIENT_OVERLAY_XATTRS
from shared.erofs.verify import data_spans, read_xattrs
from shared.errors import Conflict

SETTLED_NS = 20_000_000
"""What changed less than this before it was copied may change again with the same time."""
COPY_BYTES = 8 * 1024 * 1024
"""Copied between two looks at whether to go on."""
BESIDE_BYTES = 64 * 1024
"""Files of this size are copied side by side where there are threads for it: a core copies a
page cache at 2 GB/s, and who forks waits for it."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_VANISHED = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENXIO})


class Cancelled(Exception):
    """The caller no longer wants the copy."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """An entry as it was copied. ``settled``: an equal stamp means equal content."""

    ino: int
    kind: int
    ctime_ns: int
    settled: bool


@dataclass(slots=True)
class Copied:
    """What one pass did. ``bytes`` are those of contents copied in it."""

    entries: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Late:
    """A file whose content is being copied; what else it has comes after that."""

    content: Future[int]
    name: bytes
    path: bytes
    status: os.stat_result


@dataclass(slots=True)
class Mirror:
    """``target`` becomes like ``source``. ``cancelled`` is asked now and then. ``threads``:
    for contents, side by side."""

    source: Path
    target: Path
    cancelled: Callable[[], bool] = lambda: False
    threads: ThreadPoolExecutor | None = None
    _seen: dict[bytes, _Seen] = field(default_factory=dict)
    _links: dict[int, bytes] = field(default_factory=dict)
    _hot: frozenset[int] = frozenset()
    _lenient: bool = True
    _done: Copied = field(default_factory=Copied)
    _late: list[_Late] = field(default_factory=list)
    _root: int = -1

    def bring_up(self, *, hot: Iterable[int] = (), still: bool = False) -> Copied:
        """One pass. ``hot``: inodes to copy whatever their times say. ``still``: nothing
        changes meanwhile; where something does, ``Conflict`` is raised. Raises ``OSError``
        (disk) and :class:`Cancelled`."""
        self._hot, self._lenient, self._done = frozenset(hot), not still, Copied()
        self._links.clear()
        self.target.mkdir(mode=0o700, exist_ok=True)
        source = os.open(self.source, _DIRECTORY)
        self._root = os.open(self.target, _DIRECTORY)
        try:
            self._directory(source, self._root, b"")
            _dress(source, b".", self._root, b".", os.fstat(source))
        except OSError as error:
            if still and error.errno in _VANISHED:
                raise Conflict("files came and went while the sandbox stood still") from error
            raise
        finally:
            os.close(source)
            os.close(self._root)
        return self._done

    def _directory(self, source: int, target: int, path: bytes) -> None:
        with os.scandir(source) as found:
            entries = {os.fsencode(entry.name): entry for entry in found}
        for old in map(os.fsencode, os.listdir(target)):
            if old not in entries:
                self._remove(target, old, path + b"/" + old)
        late, self._late = self._late, []
        try:
            for name, entry in entries.items():
                if self.cancelled():
                    raise Cancelled
                with self._leniently(target, name, path + b"/" + name):
                    status = entry.stat(follow_symlinks=False)
                    self._entry(source, target, name, path + b"/" + name, status)
            for one in self._late:
                with self._leniently(target, one.name, one.path):
                    self._done.bytes += one.content.result()
                    _dress(source, one.name, target, one.name, one.status)
        finally:
            wait([one.content for one in self._late])
            self._late = late

    @contextlib.contextmanager
    def _leniently(self, target: int, name: bytes, path: bytes) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._lenient or error.errno not in _VANISHED:
                raise
            self._remove(target, name, path)

    def _entry(
        self, source: int, target: int, name: bytes, path: bytes, status: os.stat_result
    ) -> None:
        self._done.entries += 1
        now = time.time_ns()
        kind = stat.S_IFMT(status.st_mode)
        seen = self._seen.get(path)
        if seen is not None and (seen.ino, seen.kind) != (status.st_ino, kind):
            self._remove(target, name, path)
            seen = None
        same = seen is not None and seen.settled and seen.ctime_ns == status.st_ctime_ns
        if stat.S_ISDIR(status.st_mode):
            self._below(source, target, name, path, fresh=seen is None)
        if not same or status.st_ino in self._hot:
            self._take(source, target, name, path, status)
        elif kind == stat.S_IFDIR:  # what was done below it has set its time
            times = (status.st_atime_ns, status.st_mtime_ns)
            os.utime(name, ns=times, dir_fd=target, follow_symlinks=False)
        elif status.st_nlink > 1 and kind != stat.S_IFDIR:
            self._links.setdefault(status.st_ino, path)
        settled = status.st_ctime_ns < now - SETTLED_NS
        self._seen[path] = _Seen(status.st_ino, kind, status.st_ctime_ns, settled)

    def _below(self, source: int, target: int, name: bytes, path: bytes, *, fresh: bool) -> None:
        if fresh:
            os.mkdir(name, 0o700, dir_fd=target)
        inner = os.open(name, _DIRECTORY, dir_fd=source)
        try:
            copy = os.open(name, _DIRECTORY, dir_fd=target)
            try:
                self._directory(inner, copy, path)
            finally:
                os.close(copy)
        finally:
            os.close(inner)

    def _take(
        self, source: int, target: int, name: bytes, path: bytes, status: os.stat_result
    ) -> None:
        """Everything of one entry but what is below it."""
        mode = status.st_mode
        if not stat.S_ISDIR(mode) and status.st_nlink > 1:
            first = self._links.setdefault(status.st_ino, path)
            if first != path:
                self._link(target, name, path, first)
                return
        if stat.S_ISREG(mode):
            content = self._content(source, target, name)
            if content is not None:
                self._late.append(_Late(content, name, path, status))
                return
        elif not stat.S_ISDIR(mode):
            self._unlink(target, name)
            if stat.S_ISLNK(mode):
                os.symlink(os.readlink(name, dir_fd=source), name, dir_fd=target)
            else:  # whiteouts too: devices of number 0
                os.mknod(name, mode, status.st_rdev, dir_fd=target)
        _dress(source, name, target, name, status)

    def _content(self, source: int, target: int, name: bytes) -> Future[int] | None:
        """Copies it, or has that begun beside."""
        read = os.open(name, _READ, dir_fd=source)
        try:
            write = os.open(name, _WRITE, 0o600, dir_fd=target)
        except BaseException:
            os.close(read)
            raise
        if self.threads is not None and os.fstat(read).st_size >= BESIDE_BYTES:
            return self.threads.submit(self._copy_all, read, write)
        self._done.bytes += self._copy_all(read, write)
        return None

    def _copy_all(self, read: int, write: int) -> int:
        """What the descriptors, which it closes, have between them; bytes. For any thread."""
        try:
            size = os.fstat(read).st_size
            copied = sum(self._copy(read, write, *span) for span in data_spans(read, size))
            os.ftruncate(write, size)
            return copied
        finally:
            os.close(write)
            os.close(read)

    def _copy(self, read: int, write: int, start: int, end: int) -> int:
        begin = start
        while start < end:
            if self.cancelled():
                raise Cancelled
            done = _copied(read, write, min(COPY_BYTES, end - start), start)
            if done == 0:  # it became shorter; the next pass sees that
                break
            start += done
        return start - begin

    def _link(self, target: int, name: bytes, path: bytes, first: bytes) -> None:
        self._unlink(target, name)
        os.link(
            first.lstrip(b"/"), path.lstrip(b"/"), src_dir_fd=self._root, dst_dir_fd=self._root,
            follow_symlinks=False,
        )  # fmt: skip

    def _unlink(self, target: int, name: bytes) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=target)

    def _remove(self, target: int, name: bytes, path: bytes) -> None:
        """What is not there any more, or is something else now."""
        try:
            status = os.stat(name, dir_fd=target, follow_symlinks=False)
        except FileNotFoundError:
            status = None
        if status is not None and stat.S_ISDIR(status.st_mode):
            shutil.rmtree(name, dir_fd=target)
        elif status is not None:
            os.unlink(name, dir_fd=target)
        self._seen.pop(path, None)
        below = path + b"/"
        if status is not None and stat.S_ISDIR(status.st_mode):
            for known in [known for known in self._seen if known.startswith(below)]:
                del self._seen[known]


def _copied(read: int, write: int, length: int, at: int) -> int:
    """Copies within the kernel, and within the file system where both are on one."""
    try:
        return os.copy_file_range(read, write, length, at, at)
    except OSError as err:
        if err.errno != errno.EXDEV:  # a disk of its own
            raise
    os.lseek(write, at, os.SEEK_SET)
    return os.sendfile(write, read, at, length)


def _dress(
    source: int, name: bytes, target: int, copy: bytes, status: os.stat_result
) -> None:
    """Owner, mode, xattrs, times, in the order in which none undoes another."""
    os.chown(copy, status.st_uid, status.st_gid, dir_fd=target, follow_symlinks=False)
    if not stat.S_ISLNK(status.st_mode):
        os.chmod(b"/proc/self/fd/%d/%s" % (target, copy), stat.S_IMODE(status.st_mode))
    wanted = {
        key: value
        for key, value in read_xattrs(source, name).items()
        if key not in TRANSIENT_OVERLAY_XATTRS
    }
    place = b"/proc/self/fd/%d/%s" % (target, copy)
    for key in read_xattrs(target, copy).keys() - wanted.keys():
        os.removexattr(place, key, follow_symlinks=False)
    for key, value in wanted.items():
        os.setxattr(place, key, value, follow_symlinks=False)
    times = (status.st_atime_ns, status.st_mtime_ns)
    os.utime(copy, ns=times, dir_fd=target, follow_symlinks=False)


def mapped_for_writing(pids: Iterable[int], upper: Path) -> set[int]:
    """Inodes below ``upper`` that processes which stand still have mapped shared and
    writable: their content changes without their times."""
    found: set[int] = set()
    root = os.open(upper, _DIRECTORY)
    try:
        for path in {path for pid in pids for path in _shared_maps(pid)}:
            try:
                fd = open_beneath(root, path.lstrip(b"/"), os.O_PATH | os.O_NOFOLLOW)
            except OSError:  # deleted, of a lower layer, of another mount
                continue
            found.add(os.fstat(fd).st_ino)
            os.close(fd)
    finally:
        os.close(root)
    return found


def _shared_maps(pid: int) -> set[bytes]:
    try:
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
    except OSError:  # it ended
        return set()
    parts = (line.split(maxsplit=5) for line in lines)
    return {
        p[5].replace(b"\\012", b"\n")
        for p in parts
        if len(p) == 6 and p[1][1:2] == b"w" and p[1][3:4] == b"s" and p[5].startswith(b"/")
    }
