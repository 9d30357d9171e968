"""One shape for every call of a file verb.

Owns: requests, output and input of an operation, typed errors that name the path,
beginning again where a part cannot be gone on with. Does not own: what is copied
where (:mod:`libdsec.files`, :mod:`libdsec._trees`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from libdsec import _ids
from libdsec._fileerrors import file_error
from libdsec._operation import Operation
from libdsec._wire import (
    CHUNK_BYTES,
    INLINE_BYTES,
    FileEntry,
    FileReply,
    FileRequest,
    plain_name,
    whole_name,
)
from libdsec.errors import FileChanged, InputLost, InternalError, StdinClosed
from libdsec.results import FileInfo

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

ATTEMPTS = 4
"""How often a transfer begins, in all, when its source changes or its edge forgets it."""

T = TypeVar("T")
Source = Callable[[], AsyncIterator[bytes | memoryview]]
"""Gives the input from its start, each time it is called."""


class FileCalls:
    """File verbs of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def _start(self, verb: str, path: str, facts: dict[str, Any]) -> Operation[FileReply]:
        given = {k: v for k, v in facts.items() if v is not None}
        for name in ("path", "target"):
            text = path if name == "path" else given.get("target")
            if text is not None:
                given[name], raw = plain_name(text)
                given |= {} if raw is None else {f"raw_{name}": raw}
        request = FileRequest(op_id=_ids.new(), **given)
        return await self._sandbox._start(verb, request, FileReply)

    async def _final(self, operation: Operation[FileReply], path: str) -> FileReply:
        reply = await operation.final()
        if reply.error is not None:
            raise await self._sandbox._judged(file_error(reply.error, path))
        return reply

    async def call(self, verb: str, path: str, **facts: Any) -> FileReply:
        """A call whose answer is all there is to it."""
        operation = await self._start(verb, path, facts)
        try:
            return await self._final(operation, path)
        finally:
            operation.abandon()

    async def output(
        self, verb: str, path: str, **facts: Any
    ) -> AsyncIterator[bytes | FileReply]:
        """What the call streams, as fast as the caller takes it, then its answer."""
        operation = await self._start(verb, path, facts)
        try:
            while True:
                while operation.output:
                    _, data = operation.output.popleft()
                    await operation.taken(len(data))
                    yield data
                if operation.done:
                    break
                await operation.changed()
            yield await self._final(operation, path)
        finally:
            operation.abandon()

    async def content(self, path: str, **facts: Any) -> AsyncIterator[bytes]:
        """A file's bytes in chunks."""
        async for part in self.output("file_read", path, **facts):
            data = part.data if isinstance(part, FileReply) else part
            if data:
                yield data

    async def input(self, verb: str, path: str, source: Source, **facts: Any) -> int:
        """Streams ``source`` into the call; the bytes that were stored. Raises
        ``InputLost`` where the sandbox needs what this client no longer has."""
        operation = await self._start(verb, path, facts)
        count = 0
        try:
            async for chunk in source():
                await operation.send(chunk)
                count += len(chunk)
            await operation.end_input()
        except StdinClosed:
            pass  # the reply says why
        except BaseException:
            operation.abandon()
            raise
        try:
            return stored(await self._final(operation, path), count, path)
        finally:
            operation.abandon()

    async def put(self, verb: str, path: str, data: bytes, **facts: Any) -> int:
        """The whole input of a call, in its request where it is small."""
        if len(data) <= INLINE_BYTES:
            reply = await self.call(verb, path, data=data, size=len(data), **facts)
            return stored(reply, len(data), path)
        again = not facts.get("append")
        return await persistent(
            lambda: self.input(verb, path, lambda: pieces(data), size=len(data), **facts),
            attempts=ATTEMPTS if again else 1,
        )


async def persistent(work: Callable[[], Awaitable[T]], *, attempts: int = ATTEMPTS) -> T:
    """Does it again where its source changed under it, or its edge forgot it."""
    while True:
        attempts -= 1
        try:
            return await work()
        except (FileChanged, InputLost):
            if attempts <= 0:
                raise


def stored(reply: FileReply, count: int, path: str) -> int:
    """``count``, when the sandbox took as much."""
    if reply.size != count:
        text = f"{path}: {count} bytes were sent, {reply.size} stored"
        raise InternalError(text, retryable=True)
    return count


def info_of(entry: FileEntry) -> FileInfo:
    """A file's facts as users see them."""
    names = ("type", "size", "mode", "uid", "gid", "mtime", "ino", "nlink", "mtime_ns", "ctime_ns")
    target = entry.target
    return FileInfo(
        path=whole_name(entry.path, entry.raw_path),
        target=None if target is None else whole_name(target, entry.raw_target),
        **{name: getattr(entry, name) for name in names},
    )


async def pieces(data: bytes) -> AsyncIterator[bytes | memoryview]:
    """``data`` in chunks."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


async def each(source: AsyncIterable[bytes] | Iterable[bytes]) -> AsyncIterator[bytes]:
    """The items of any iterable; one that blocks does so in a thread."""
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
        return
    items = iter(source)
    while (data := await asyncio.to_thread(next, items, None)) is not None:
        yield data
