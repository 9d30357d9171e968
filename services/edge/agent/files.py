"""File operations of an agent in terms of the port's ``Files``.

Owns: reading, writing and looking at files of a sandbox through its agent. Does not
own: path resolution and rights, which happen in the sandbox as the given user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.edge.agent import wire
from services.edge.agent.client import AgentClient, started
from services.edge.agent.wire import Fields, FileOp, Msg, Tag
from services.edge.drivers.base import FileInfo
from shared.errors import InvalidRequest

TYPES = {
    "f": "file", "d": "dir", "l": "symlink", "p": "fifo", "s": "socket", "c": "chr", "b": "blk",
}  # fmt: skip
ENTRIES_MAX = 65_536  # of one directory
RECORD_BYTES_MAX = 16 * 1024  # of one entry: two paths and numbers
READ_CHUNKS_AHEAD = 2  # chunks of at most 192 KiB between agent and reader


def _payload(op: FileOp, path: str, user: str, *extra: bytes) -> bytes:
    if not path.startswith("/"):
        raise InvalidRequest("the path is not absolute", field="path")
    if "\0" in path:
        raise InvalidRequest("the path holds a NUL byte", field="path")
    fields = (wire.field(Tag.FOP, op), wire.field(Tag.PATH, path), wire.field(Tag.USER, user))
    return b"".join((*fields, *extra))


def info_of(record: Fields, path: str) -> FileInfo:
    return FileInfo(
        path=path,
        type=TYPES.get(record.text(Tag.TYPE), "file"),
        size=record.number(Tag.SIZE),
        mode=record.number(Tag.FMODE),
        uid=record.number(Tag.UID),
        gid=record.number(Tag.GID),
        mtime=record.number(Tag.MTIME_NS) / 1e9,
        target=record.text(Tag.TARGET) if Tag.TARGET in record else None,
    )


async def _no_output(_stream: int, _data: bytes) -> None:
    return None


async def _simple(agent: AgentClient, payload: bytes) -> Fields:
    return await started(lambda: agent.run(Msg.FILE, payload, _no_output))


async def read(
    agent: AgentClient, path: str, *, user: str, offset: int = 0, length: int | None = None
) -> AsyncIterator[bytes]:
    """The file's bytes in order; the reader's pace is the agent's."""
    extra = [wire.field(Tag.OFFSET, offset)]
    if length is not None:
        extra.append(wire.field(Tag.LENGTH, length))
    payload = _payload(FileOp.READ, path, user, *extra)
    queue: asyncio.Queue[bytes] = asyncio.Queue(READ_CHUNKS_AHEAD)

    async def on_output(_stream: int, data: bytes) -> None:
        await queue.put(data)

    async def fetch() -> None:
        try:
            await started(lambda: agent.run(Msg.FILE, payload, on_output))
        finally:
            await queue.put(b"")

    task = asyncio.ensure_future(fetch())
    try:
        while data := await queue.get():
            yield data
        await task
    finally:
        task.cancel()
        while not task.done():  # an early end of reading ends the operation
            while not queue.empty():
                queue.get_nowait()
            await asyncio.wait([task], timeout=0.01)


async def write(
    agent: AgentClient, path: str, chunks: AsyncIterator[bytes], *, user: str,
    mode: int | None = None, append: bool = False,
) -> FileInfo:  # fmt: skip
    """Atomic unless ``append``; an error of ``chunks`` leaves the old file as it was."""
    extra = [wire.field(Tag.APPEND, int(append))]
    if mode is not None:
        extra.append(wire.field(Tag.MODE, mode))
    payload = _payload(FileOp.WRITE, path, user, *extra)
    return info_of(await agent.run(Msg.FILE, payload, _no_output, stdin=chunks), path)


async def stat(agent: AgentClient, path: str, *, user: str) -> FileInfo:
    return info_of(await _simple(agent, _payload(FileOp.STAT, path, user)), path)


async def list_dir(agent: AgentClient, path: str, *, user: str) -> list[FileInfo]:
    """The entries of a directory, sorted by path. Raises ``InvalidRequest`` for more than
    ``ENTRIES_MAX``."""
    base = path.rstrip("/")
    infos: list[FileInfo] = []
    decoder = wire.RecordDecoder(Tag.NAME, RECORD_BYTES_MAX)

    def take(records: list[Fields]) -> None:  # bit by bit: a large one stalls nobody
        infos.extend(info_of(r, f"{base}/{r.text(Tag.NAME)}") for r in records)
        if len(infos) > ENTRIES_MAX:
            raise InvalidRequest(f"a directory of more than {ENTRIES_MAX} entries", field="path")

    async def on_output(_stream: int, data: bytes) -> None:
        take(decoder.feed(data))

    payload = _payload(FileOp.LIST, path, user)
    await started(lambda: agent.run(Msg.FILE, payload, on_output))
    take(decoder.end())
    return sorted(infos, key=lambda i: i.path)


async def mkdir(
    agent: AgentClient, path: str, *, user: str, mode: int = 0o755, parents: bool = True
) -> None:
    extra = (wire.field(Tag.MODE, mode), wire.field(Tag.PARENTS, int(parents)))
    await _simple(agent, _payload(FileOp.MKDIR, path, user, *extra))


async def remove(agent: AgentClient, path: str, *, user: str, recursive: bool = False) -> None:
    extra = wire.field(Tag.RECURSIVE, int(recursive))
    await _simple(agent, _payload(FileOp.REMOVE, path, user, extra))


async def move(agent: AgentClient, src: str, dst: str, *, user: str) -> None:
    payload = _payload(FileOp.MOVE, src, user, wire.field(Tag.DST, dst))
    await _simple(agent, payload)
