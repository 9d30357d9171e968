"""Compares a written layer, as the kernel shows it, with the tree it was made from.

Owns: the comparison of names, types, modes, owners, times, sizes, devices, xattrs,
link targets, hard links and contents. Does not own: the mount. A conversion that
drops or alters anything is refused before the layer gets a name. Contents of larger files
are read and digested by a second thread, beside the walk over the entries.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shared.erofs.kernelmount import mounted_layer
from shared.erofs.layertree import OPAQUE_XATTR, Inode
from shared.errors import Internal

READ_BYTES = 1024 * 1024
DIGESTED_WHOLE_MAX_BYTES = 8 * 1024 * 1024
ASIDE_MIN_BYTES = 64 * 1024
"""Handing a smaller file over costs as much as its digest."""
ASIDE_MAX = 64
"""Files handed over at a time: each is open."""
PAGE_BYTES = 4096
ZERO_PAGE = bytes(PAGE_BYTES)


def check_layer(
    root: Inode,
    meta_path: Path,
    data_path: Path | None,
    digests: dict[int, bytes],
    *,
    tick: Callable[[int], None],
) -> None:
    """Raise ``Internal`` naming the first entry that differs from ``root``.

    ``digests``: content digest by ``id(inode)``, taken while the source was read.
    ``tick`` is called with 0 for each entry and may raise to cancel.
    """
    with mounted_layer(meta_path, data_path) as root_fd, _Aside() as aside:
        _Check(digests, tick, aside).run(root_fd, root)


class SparseDigest:
    """SHA-256 over the pages that are not zero, each led by its offset (8 bytes, little endian).

    For big files with holes: independent of where holes were kept, and hashing
    terabytes of nothing would take hours.
    """

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()

    def update(self, at: int, piece: bytes | memoryview) -> None:
        """Add ``piece``, which lies at ``at``, a multiple of the page size."""
        for page_at in range(0, len(piece), PAGE_BYTES):
            page = piece[page_at : page_at + PAGE_BYTES]
            if page != ZERO_PAGE[: len(page)]:
                self._sha256.update((at + page_at).to_bytes(8, "little"))
                self._sha256.update(page)

    def digest(self) -> bytes:
        return self._sha256.digest()


def content_digest(fd: int, inode: Inode, view: memoryview) -> bytes:
    """The digest the writer takes of a file's content, read through the buffer ``view``."""
    if inode.size > DIGESTED_WHOLE_MAX_BYTES and inode.has_holes:
        sparse = SparseDigest()
        for start, end in data_spans(fd, inode.size):
            for at in range(start, end, len(view)):
                length = os.preadv(fd, [view[: min(len(view), end - at)]], at)
                sparse.update(at, view[:length])
        return sparse.digest()
    whole = hashlib.sha256()
    for at in range(0, inode.size, len(view)):
        length = os.preadv(fd, [view], at)
        whole.update(view[:length])
    return whole.digest()


def data_spans(fd: int, size: int) -> list[tuple[int, int]]:
    """The parts of a file that hold data, as ``(start, end)`` in bytes."""
    spans: list[tuple[int, int]] = []
    at = 0
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:  # ENXIO: nothing but a hole up to the end
            break
        end = min(size, os.lseek(fd, start, os.SEEK_HOLE))
        if start < end:
            spans.append((start, end))
        at = max(end, start + 1)
    return spans


class _Aside:
    """Checks that run in a second thread, in order; at most ASIDE_MAX of them are pending."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="content check")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> _Aside:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()  # no file of the layer stays open

    def add(self, check: Callable[[], None]) -> None:
        """``check`` runs in any case; raises what an earlier one found."""
        self._pending.append(self._thread.submit(check))
        while self._pending and (len(self._pending) > ASIDE_MAX or self._pending[0].done()):
            self._pending.popleft().result()

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft().result()


class _Check:
    def __init__(
        self, digests: dict[int, bytes], tick: Callable[[int], None], aside: _Aside
    ) -> None:
        self._digests = digests
        self._tick = tick
        self._aside = aside
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._aside_buffer = memoryview(bytearray(READ_BYTES))
        self._numbers: dict[int, int] = {}  # id(inode) -> st_ino, for hard links

    def run(self, root_fd: int, root: Inode) -> None:
        self._attributes(b"", os.fstat(root_fd), root)
        self._xattrs(b"", root_fd, b".", root)
        self._directory(root_fd, b"", root)
        self._aside.finish()

    def _directory(self, fd: int, path: bytes, inode: Inode) -> None:
        found = {os.fsencode(name) for name in os.listdir(fd)}
        if found != set(inode.children):
            odd = sorted(found ^ set(inode.children))[:5]
            raise _differs(path, "names", set(inode.children) - found, odd)
        for name, child in sorted(inode.children.items()):
            self._entry(fd, name, path + b"/" + name, child)

    def _entry(self, fd: int, name: bytes, path: bytes, inode: Inode) -> None:
        self._tick(0)
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        self._attributes(path, status, inode)
        known = self._numbers.setdefault(id(inode), status.st_ino)
        if known != status.st_ino:
            raise _differs(path, "hard link to inode", known, status.st_ino)
        self._xattrs(path, fd, name, inode)
        if inode.is_link:
            target = os.readlink(name, dir_fd=fd)
            if target != inode.target:
                raise _differs(path, "link target", inode.target, target)
        elif inode.is_dir:
            child_fd = _opened(fd, name, os.O_DIRECTORY)
            try:
                self._directory(child_fd, path, inode)
            finally:
                os.close(child_fd)
        elif inode.is_regular and inode.size:
            child_fd = _opened(fd, name, 0)
            if inode.size < ASIDE_MIN_BYTES:
                self._content(child_fd, path, inode, self._buffer)
            else:
                self._aside.add(
                    partial(self._content, child_fd, path, inode, self._aside_buffer)
                )

    def _content(self, fd: int, path: bytes, inode: Inode, view: memoryview) -> None:
        """Compares the content of an open file, which is closed then."""
        try:
            if content_digest(fd, inode, view) != self._digests[id(inode)]:
                raise _differs(path, "content", "as in the source", "other bytes")
        finally:
            os.close(fd)

    def _attributes(self, path: bytes, status: os.stat_result, inode: Inode) -> None:
        expected = (inode.mode, inode.uid, inode.gid, inode.mtime_ns)
        found = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns)
        if expected != found:
            raise _differs(path, "mode, uid, gid, mtime", expected, found)
        if inode.is_regular and status.st_size != inode.size:
            raise _differs(path, "size", inode.size, status.st_size)
        if inode.is_device and status.st_rdev != inode.rdev:
            raise _differs(path, "device number", inode.rdev, status.st_rdev)

    def _xattrs(self, path: bytes, fd: int, name: bytes, inode: Inode) -> None:
        found = read_xattrs(fd, name)
        expected = dict(inode.xattrs)
        if inode.opaque:
            expected[OPAQUE_XATTR] = b"y"
        if found != expected:
            raise _differs(path, "xattrs", expected, found)


def _opened(fd: int, name: bytes, flags: int) -> int:
    return os.open(name, flags | os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)


def read_xattrs(fd: int, name: bytes) -> dict[bytes, bytes]:
    """The extended attributes of ``name`` in the directory ``fd``, links not followed."""
    path = b"/proc/self/fd/%d/%s" % (fd, name)
    names = os.listxattr(path, follow_symlinks=False)
    return {os.fsencode(key): os.getxattr(path, key, follow_symlinks=False) for key in names}


def _differs(path: bytes, what: str, expected: object, found: object) -> Internal:
    shown = "/" + path.decode(errors="backslashreplace").lstrip("/")
    return Internal(
        f"the converted layer differs from its source at {shown}: {what}",
        details={"path": shown, "what": what, "expected": str(expected), "found": str(found)},
    )
