"""The optional ports of drivers for files; the prose is the specification, as in
:mod:`services.edge.drivers.base`.

Owns: what a driver promises of files. Does not own: any driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.edge.drivers.base import Handle, ResumeIO


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file. ``type`` is file, dir, symlink, fifo, socket, chr or blk; ``mode``
    are the permission bits; ``mtime`` seconds since the epoch; ``ctime_ns`` the last change
    of any kind, 0 where that is not known."""

    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    ino: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    ctime_ns: int = 0


@dataclass(frozen=True, slots=True)
class FileChange:
    """``change``: ready, created, modified, deleted or overflow; ``info``: what is there
    now."""

    change: str
    path: str
    info: FileInfo | None = None


@runtime_checkable
class Files(Protocol):
    """Optional: files inside the sandbox, resolved inside its root as ``user``.

    Errors: ``NotFound``, ``Forbidden`` or ``InvalidRequest`` whose ``field`` is
    ``path`` and whose ``details["errno"]`` is the errno name (``ENOENT``,
    ``EACCES``, ``EISDIR``, ``ENOTDIR``, ``ENOSPC``, ``ENOTREG`` for anything but
    a regular file …)."""

    def read(
        self, handle: Handle, path: str, *, user: str | None, offset: int = 0,
        length: int | None = None, source: str | None = None,
        opened: Callable[[str], None] | None = None,
    ) -> AsyncIterator[bytes]:
        """The content. ``opened`` is told, before the first byte, which file it is and in
        which state; with ``source`` it must be that one (else ``Conflict`` with the errno
        ``ESTALE``)."""
        ...  # fmt: skip

    async def write(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        mode: int | None = None, append: bool = False, mtime_ns: int | None = None,
        sparse: bool = False, key: str | None = None,
    ) -> FileInfo:
        """Creates missing parents, replaces atomically, returns the final file's
        info: success means that the bytes are in the sandbox. ``sparse``: long rows of
        zeros become holes. ``key``: see :meth:`FileTrees.resume_input`."""
        ...  # fmt: skip

    async def stat(self, handle: Handle, path: str, *, user: str | None) -> FileInfo: ...

    def list(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> AsyncIterator[list[FileInfo]]:
        """The entries of a directory, or of all below it (parents first, not through
        links), in batches, in no order."""
        ...

    async def mkdir(
        self, handle: Handle, path: str, *, user: str | None, mode: int = 0o755,
        parents: bool = True,
    ) -> None: ...  # fmt: skip

    async def remove(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = False
    ) -> None: ...

    async def move(self, handle: Handle, src: str, dst: str, *, user: str | None) -> None: ...


@runtime_checkable
class FileTrees(Protocol):
    """Optional: many files in one call, and watching. Errors as of :class:`Files`."""

    def pack(
        self, handle: Handle, path: str, names: bytes, *, user: str | None, contents: bool = True
    ) -> AsyncIterator[bytes]:
        """A bundle (:mod:`schemas.exec`) of the files below ``path`` that ``names`` names,
        a zero byte behind each. Without ``contents`` of whatever is there."""
        ...

    async def unpack(
        self, handle: Handle, path: str, chunks: AsyncIterator[bytes], *, user: str | None,
        key: str | None = None,
    ) -> FileInfo:
        """Lays out a bundle below ``path``, each file as a whole; what is broken off or
        failed is an error that names the entry."""
        ...  # fmt: skip

    def watch(
        self, handle: Handle, path: str, *, user: str | None, recursive: bool = True
    ) -> AsyncIterator[Sequence[FileChange]]:
        """What changes below a directory, as it changes, from the change ``ready`` on.
        ``Unsupported`` where there is no way to be told, ``QuotaExceeded`` for more
        directories than can be watched."""
        ...

    async def resume_input(
        self, handle: Handle, key: str, io: ResumeIO, chunks: AsyncIterator[bytes]
    ) -> FileInfo | None:
        """Goes on with the :meth:`Files.write` or :meth:`unpack` of an earlier edge process
        after the input it has; ``None`` when nobody knows it."""
        ...
