"""Files of a sandbox.

Owns: whole-file and streamed transfer in bounded chunks, trees, typed errors that
name the path. Does not own: the stream protocol. A write has succeeded only when
the sandbox said how many bytes it stored and that is what was sent.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from libdsec import _ids, _trees, _workspace
from libdsec._operation import Operation
from libdsec._wire import CHUNK_BYTES, INLINE_BYTES, FileEntry, FileReply, FileRequest
from libdsec.args import Seconds, seconds
from libdsec.errors import FileNotFound, InternalError, StdinClosed, file_error
from libdsec.results import FileChange, FileInfo

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

Progress = Callable[[int], None]
"""Called with the bytes of each chunk as it is taken over."""
WATCH_S = 1.0
"""Seconds between two looks of a watch."""
DIFF_LIMIT_BYTES = 64 * 1024 * 1024
LocalPath = str | os.PathLike[str]


class Files:
    """``sandbox.files``. Paths are absolute or relative to the working directory;
    ``user`` is whose permissions count (default: the sandbox's user)."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

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
        whole = io.BytesIO()  # takes each part while it is warm; its value is no copy
        async for part in self._stream(path, offset=offset, length=length, user=user):
            whole.write(part)
        data = whole.getvalue()
        return data.decode() if text else data

    async def write(
        self,
        path: str,
        data: bytes | str,
        *,
        user: str | None = None,
        mode: int | None = None,
        append: bool = False,
    ) -> int:
        """Writes (or appends) ``data``; parents are made. Bytes written."""
        raw = data.encode() if isinstance(data, str) else bytes(data)
        facts = {"user": user, "mode": mode, "append": append}
        if len(raw) <= INLINE_BYTES:
            reply = await self._call("file_write", path, data=raw, size=len(raw), **facts)
            return _stored(reply, len(raw), path, append=append)
        return await self._write(path, _chunks(raw), size=len(raw), **facts)

    async def append(self, path: str, data: bytes | str, *, user: str | None = None) -> int:
        """Adds to the end of a file, which is made where it is missing."""
        return await self.write(path, data, user=user, append=True)

    async def list(
        self, path: str, *, recursive: bool = False, user: str | None = None
    ) -> list[FileInfo]:
        """The entries of a directory; ``recursive`` those below it too, parents first.
        Links are not followed."""
        found, todo = [], [path]
        while todo:
            reply = await self._call("file_list", todo.pop(), user=user)
            entries = [_info(entry) for entry in reply.entries or []]
            found += entries
            if recursive:
                todo += [e.path for e in reversed(entries) if e.is_dir]
        return found

    async def stat(self, path: str, *, user: str | None = None) -> FileInfo:
        """One file's facts; of a symbolic link, its own."""
        reply = await self._call("file_stat", path, user=user)
        if reply.entry is None:
            raise InternalError(f"{path}: the answer has no entry")
        return _info(reply.entry)

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
        await self._call("file_mkdir", path, parents=parents, mode=mode, user=user)

    async def move(self, path: str, target: str, *, user: str | None = None) -> None:
        """Renames within the sandbox."""
        await self._call("file_move", path, target=target, user=user)

    async def remove(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Removes a file, or a directory (with entries only if ``recursive``)."""
        await self._call("file_remove", path, recursive=recursive, user=user)

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
        interval: Seconds = WATCH_S,
        user: str | None = None,
    ) -> AsyncIterator[FileChange]:
        """Changes below a directory from the first step of the iteration on, found by a
        look every ``interval`` seconds: what comes and goes in between is not seen.
        Ends with ``FileNotFound`` when the directory is gone."""
        interval_s = seconds(interval, "interval") or WATCH_S
        changes = _workspace.watch(
            self, path, recursive=recursive, interval_s=interval_s, user=user
        )
        async for change in changes:
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
        progress: Progress | None = None,
    ) -> int:
        """Copies a local file into the sandbox in chunks. Bytes written; the mode is
        the local file's unless given."""
        with open(local, "rb") as source:  # noqa: ASYNC230 - opening is local and quick
            facts = os.fstat(source.fileno())
            mode = facts.st_mode & 0o7777 if mode is None else mode
            chunks = _from_file(source, progress)
            return await self._write(remote, chunks, size=None, user=user, mode=mode)

    async def download(
        self,
        remote: str,
        local: LocalPath,
        *,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copies a file out of the sandbox in chunks. The local file appears only
        when it is complete. Bytes read."""
        target, count = Path(local), 0
        part = target.with_name(f".{_ids.new()}.part")  # the name itself may be of full length
        try:
            with part.open("wb") as sink:
                async for data in self._stream(remote, user=user):
                    await asyncio.to_thread(sink.write, data)
                    count += len(data)
                    if progress is not None:
                        progress(len(data))
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return count

    async def upload_tree(
        self,
        local: LocalPath,
        remote: str,
        *,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copies a local directory's content below ``remote``. Symbolic links are
        followed. Bytes written."""
        return await _trees.upload(self, Path(local), remote, user=user, progress=progress)

    async def download_tree(
        self,
        remote: str,
        local: LocalPath,
        *,
        user: str | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Copies a directory's content below the local ``local``. Nothing is written
        outside of it, whatever the sandbox says. Bytes read."""
        return await _trees.download(self, remote, Path(local), user=user, progress=progress)

    # -- the door ----------------------------------------------------------------

    async def _start(self, verb: str, path: str, **facts: Any) -> Operation[FileReply]:
        given = {k: v for k, v in facts.items() if v is not None}
        request = FileRequest(op_id=_ids.new(), path=path, **given)
        return await self._sandbox._start(verb, request, FileReply)

    async def _call(self, verb: str, path: str, **facts: Any) -> FileReply:
        return await self._final(await self._start(verb, path, **facts), path)

    async def _final(self, operation: Operation[FileReply], path: str) -> FileReply:
        try:
            reply = await operation.final()
        except BaseException:
            operation.abandon()
            raise
        if reply.error is not None:
            raise await self._sandbox._judged(file_error(reply.error, path))
        return reply

    async def _stream(
        self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None
    ) -> AsyncIterator[bytes]:
        """Content in chunks, as fast as the caller takes it."""
        operation = await self._start(
            "file_read", path, offset=offset, length=length, user=user
        )
        try:
            while True:
                while operation.output:
                    _, data = operation.output.popleft()
                    await operation.taken(len(data))
                    yield data
                if operation.done:
                    break
                await operation.changed()
            reply = await self._final(operation, path)
            if reply.data:
                yield reply.data
        finally:
            operation.abandon()

    async def _write(
        self,
        path: str,
        chunks: AsyncIterator[bytes | memoryview],
        *,
        size: int | None,
        **facts: Any,
    ) -> int:
        operation = await self._start("file_write", path, size=size, **facts)
        count = 0
        try:
            async for chunk in chunks:
                await operation.send(chunk)
                count += len(chunk)
            await operation.end_input()
        except StdinClosed:
            pass  # the reply says why
        except BaseException:
            operation.abandon()
            raise
        reply = await self._final(operation, path)
        return _stored(reply, count, path, append=bool(facts.get("append")))


def _stored(reply: FileReply, count: int, path: str, *, append: bool) -> int:
    """``count``, when the sandbox stored as much."""
    if reply.size != count and not append:
        text = f"{path}: {count} bytes were sent, {reply.size} stored"
        raise InternalError(text, retryable=True)
    return count


def _info(entry: FileEntry) -> FileInfo:
    return FileInfo(**{name: getattr(entry, name) for name in FileInfo.__dataclass_fields__})


async def _chunks(data: bytes) -> AsyncIterator[bytes | memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


async def _from_file(source: Any, progress: Progress | None) -> AsyncIterator[bytes]:
    while data := await asyncio.to_thread(source.read, CHUNK_BYTES):
        yield data
        if progress is not None:
            progress(len(data))
