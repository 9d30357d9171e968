"""Files of a sandbox.

Owns: what users call, copies of single files. Does not own: the calls themselves
(:mod:`libdsec._filecalls`), trees, the stream protocol. A write has succeeded only when
the sandbox said how many bytes it stored and that is what was sent.
"""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from libdsec import _local, _resume, _trees, _workspace
from libdsec._filecalls import FileCalls, each, info_of, persistent
from libdsec._local import OnBytes, Taken
from libdsec._trees import OutsideLinks
from libdsec.args import Seconds, seconds
from libdsec.errors import FileNotFound, InternalError
from libdsec.results import FileChange, FileInfo, TreeCopy

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

WATCH_S = 1.0
"""Seconds between two looks of a watch where the kernel tells nothing."""
DIFF_LIMIT_BYTES = 64 * 1024 * 1024
LocalPath = str | os.PathLike[str]


class Files:
    """``sandbox.files``. Paths are absolute or relative to the working directory;
    ``user`` is whose permissions count (default: the sandbox's user)."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._calls = FileCalls(sandbox)

    def __repr__(self) -> str:
        return f"Files({self._sandbox!r})"

    @overload
    async def read(
        self, path: str, text: Literal[False] = ..., *, offset: int = ...,
        length: int | None = ..., user: str | None = ...,
    ) -> bytes: ...  # fmt: skip
    @overload
    async def read(
        self, path: str, text: Literal[True], *, offset: int = ..., length: int | None = ...,
        user: str | None = ...,
    ) -> str: ...  # fmt: skip
    async def read(
        self,
        path: str,
        text: bool = False,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
    ) -> bytes | str:
        """The content (``length`` bytes from ``offset``). ``text`` decodes it strictly
        as UTF-8. Raises ``FileNotFound``, ``FileIsADirectory``,
        ``FilePermissionDenied``."""
        facts = {"offset": offset, "length": length, "user": user}

        async def content() -> bytes:
            whole = io.BytesIO()  # takes each part while it is warm; its value is no copy
            async for part in self._calls.content(path, **facts):
                whole.write(part)
            return whole.getvalue()

        data = await persistent(content)
        return data.decode() if text else data

    async def stream(
        self,
        path: str,
        *,
        offset: int = 0,
        length: int | None = None,
        user: str | None = None,
    ) -> AsyncIterator[bytes]:
        """The content in chunks, as fast as they are taken. Raises ``FileChanged`` where
        the node's service was restarted meanwhile and the file is another one now."""
        facts = {"offset": offset, "length": length, "user": user}
        async for part in self._calls.content(path, **facts):
            yield part

    async def write(
        self,
        path: str,
        data: bytes | str | AsyncIterable[bytes] | Iterable[bytes],
        *,
        user: str | None = None,
        mode: int | None = None,
        append: bool = False,
    ) -> int:
        """Writes (or appends) ``data``, at once or as it comes; parents are made. Bytes
        written. What comes piece by piece is replaced as a whole too, when it has ended."""
        facts = {"user": user, "mode": mode, "append": append}
        if isinstance(data, str | bytes | bytearray | memoryview):
            raw = data.encode() if isinstance(data, str) else bytes(data)
            return await self._calls.put("file_write", path, raw, **facts)
        return await self._calls.input("file_write", path, lambda: each(data), **facts)

    async def append(self, path: str, data: bytes | str, *, user: str | None = None) -> int:
        """Adds to the end of a file, which is made where it is missing."""
        return await self.write(path, data, user=user, append=True)

    async def list(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> list[FileInfo]:
        """The entries of a directory by name; ``recursive`` those below it too, parents
        first. Links are not followed."""

        return await _workspace.entries(self._calls, path, recursive=recursive, user=user)

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """One file's facts; of a symbolic link, its own."""
        reply = await self._calls.call("file_stat", path, user=user)
        if reply.entry is None:
            raise InternalError(f"{path}: the answer has no entry")
        return info_of(reply.entry)

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether there is something at ``path``."""
        try:
            await self.stat(path, user=user)
        except FileNotFound:
            return False
        return True

    async def mkdir(
        self,
        path: str,
        *,
        parents: bool = True,
        mode: int | None = None,
        user: str | None = None,
    ) -> None:
        """Makes a directory; with ``parents`` also those above, and one that exists
        is fine."""
        await self._calls.call("file_mkdir", path, parents=parents, mode=mode, user=user)

    async def move(self, path: str, target: str, *, user: str | None = None) -> None:
        """Renames within the sandbox."""
        await self._calls.call("file_move", path, target=target, user=user)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file, or a directory (with entries only if ``recursive``)."""
        await self._calls.call("file_remove", path, recursive=recursive, user=user)

    async def glob(self, pattern: str, *, user: str | None = None) -> Sequence[FileInfo]:
        """What matches, sorted by path: ``*``, ``?`` and ``[…]`` within a name, ``**`` any
        number of directories. Names that begin with a dot match as any other. ``**``
        follows no links; what ``user`` may not see is left out."""
        return await _workspace.glob(self, pattern, user=user)

    async def watch(
        self,
        path: str,
        *,
        recursive: bool = True,
        ready: bool = False,
        interval: Seconds = WATCH_S,
        user: str | None = None,
    ) -> AsyncIterator[FileChange]:
        """Changes below a directory, told by the sandbox's kernel as they happen, in
        order, until the iteration is closed. With ``ready`` the first one says that from
        here on nothing is missed. Changes of one file within 10 ms may come as one. After
        ``overflow`` some were lost: look again. What changes through memory mappings is
        not told. Where the kernel has no watch to give, a look every ``interval`` seconds
        finds what changed between two of them. Raises ``FileNotFound`` when the directory
        is gone, ``QuotaExceeded`` for more than 8192 directories."""
        interval_s = seconds(interval, "interval") or WATCH_S
        changes = _workspace.watch(
            self, self._calls, path, recursive=recursive, interval_s=interval_s, user=user
        )
        async for change in changes:
            if ready or change.kind != "ready":
                yield change

    async def diff(
        self,
        path: str = ".",
        *,
        base: str = "HEAD",
        user: str | None = None,
        limit_bytes: int = DIFF_LIMIT_BYTES,
    ) -> bytes:
        """The git patch from ``base`` to what is below ``path`` now: new files, deletions,
        modes and binary content too, ignored files not. ``git apply`` takes it. The
        workspace's index stays as it is. Raises ``FileNotFound`` where there is no
        repository, ``Unsupported`` where there is no git."""
        return await _workspace.diff(
            self._sandbox, path, base=base, user=user, limit_bytes=limit_bytes
        )

    async def upload(
        self,
        local: LocalPath,
        remote: str,
        *,
        user: str | None = None,
        mode: int | None = None,
        resume: bool = False,
        on_progress: OnBytes | None = None,
    ) -> int:
        """Copies a local file into the sandbox in chunks. Bytes written; the mode is
        the local file's unless given. It goes on where it was after a broken connection
        or a restart of the node's service. With ``resume`` a call that failed leaves what it
        sent in a part (``.….dsec-part``) beside ``remote``, and the next call with it goes
        on from there, as long as the local file is the same and unchanged."""
        copy = _resume.upload if resume else _local.upload
        with _local.open_regular(Path(local), follow=True) as source:
            return await copy(
                self._calls, source, remote, user=user, mode=mode, report=Taken(on_progress)
            )

    async def download(
        self,
        remote: str,
        local: LocalPath,
        *,
        user: str | None = None,
        resume: bool = False,
        on_progress: OnBytes | None = None,
    ) -> int:
        """Copies a file out of the sandbox in chunks. The local file appears only
        when it is complete. Bytes read. After a restart of the node's service it goes on
        where it was if the file is unchanged, and begins again if not. With ``resume`` so
        does a later call after one that failed, from a part (``.….dsec-part``) beside
        ``local``."""
        copy = _resume.download if resume else _local.download
        return await copy(
            self._calls, remote, Path(local), user=user, report=Taken(on_progress)
        )

    async def upload_tree(
        self,
        local: LocalPath,
        remote: str,
        *,
        user: str | None = None,
        exclude: Sequence[str] = (),
        skip_same: bool = True,
        on_progress: OnBytes | None = None,
    ) -> TreeCopy:
        """Copies a local directory's content below ``remote``: files with mode and time of
        change, empty directories, symbolic links as links, several names of one file as
        such; not owners (all is ``user``'s) nor extended attributes. Each file is replaced
        as a whole. ``exclude``: patterns of names, or with ``/`` of relative paths; what is
        below goes too. With ``skip_same`` files whose size, mode and time are the same
        there are not sent: a transfer that broke off goes on cheaply. What is no file,
        directory or link is ``NotARegularFile``."""
        return await _trees.upload(
            self._calls, Path(local), remote, user=user, exclude=exclude,
            skip_same=skip_same, report=Taken(on_progress),
        )  # fmt: skip

    async def download_tree(
        self,
        remote: str,
        local: LocalPath,
        *,
        user: str | None = None,
        exclude: Sequence[str] = (),
        skip_same: bool = True,
        outside_links: OutsideLinks = "refuse",
        on_progress: OnBytes | None = None,
    ) -> TreeCopy:
        """Copies a directory's content below the local ``local``, as
        :meth:`upload_tree`. Nothing is written outside of it, whatever the sandbox says.
        Links that lead outside are an error before anything is written, or are left out
        (``skip``), or made all the same (``keep``). Of modes the permission bits are
        taken, never set-user-id and its like."""
        return await _trees.download(
            self._calls, remote, Path(local), user=user, exclude=exclude,
            skip_same=skip_same, outside_links=outside_links, report=Taken(on_progress),
        )  # fmt: skip
