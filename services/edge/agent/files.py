"""File operations of an agent in terms of the port's ``Files`` and ``FileTrees``.

Owns: reading, writing and looking at files of a sandbox through its agent. Does not
own: path resolution and rights, which happen in the sandbox as the given user.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

from services.edge.agent import wire
from services.edge.agent.client import AgentClient, started
from services.edge.agent.wire import Fields, FileOp, Msg, ProtocolError, Tag
from services.edge.drivers.base import ResumeIO
from services.edge.drivers.files import FileChange, FileInfo
from shared.errors import InvalidRequest

TYPES = {
    "f": "file", "d": "dir", "l": "symlink", "p": "fifo", "s": "socket", "c": "chr", "b": "blk",
}  # fmt: skip
CHANGES = {"b": "ready", "c": "created", "m": "modified", "d": "deleted", "o": "overflow"}
READ_CHUNKS_AHEAD = 2  # chunks of at most 128 KiB between agent and reader
ENTRY_BYTES_MAX = 64 * 1024


@contextmanager
def _agents_own() -> Iterator[None]:
    """What an agent does against the protocol is its sandbox's own doing."""
    try:
        yield
    except ProtocolError as exc:
        raise InvalidRequest(f"the sandbox's agent broke the protocol: {exc}") from exc


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
        ino=record.number(Tag.INO),
        nlink=record.number(Tag.NLINK, 1),
        mtime_ns=record.number(Tag.MTIME_NS),
        ctime_ns=record.number(Tag.CTIME_NS),
    )


async def _no_output(_stream: int, _data: bytes) -> None:
    return None


async def _simple(agent: AgentClient, payload: bytes) -> Fields:
    return await started(lambda: agent.run(Msg.FILE, payload, _no_output))


async def _streamed(
    agent: AgentClient, payload: bytes, stdin: Callable[[], AsyncIterator[bytes]] | None = None
) -> AsyncIterator[bytes]:
    """The output of an operation in order; the reader's pace is the agent's."""
    queue: asyncio.Queue[bytes] = asyncio.Queue(READ_CHUNKS_AHEAD)

    async def on_output(_stream: int, data: bytes) -> None:
        await queue.put(data)

    async def fetch() -> None:
        try:
            await started(
                lambda: agent.run(Msg.FILE, payload, on_output, stdin=stdin() if stdin else None)
            )
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


async def read(
    agent: AgentClient, path: str, *, user: str, offset: int = 0, length: int | None = None,
    source: str | None = None, opened: Callable[[str], None] | None = None,
) -> AsyncIterator[bytes]:  # fmt: skip
    """The file's bytes in order. ``opened`` is told which file it is before the first;
    with ``source`` it must be that one, unchanged."""
    extra = [wire.field(Tag.OFFSET, offset)]
    if length is not None:
        extra.append(wire.field(Tag.LENGTH, length))
    if source is not None:
        extra.append(wire.field(Tag.SOURCE, source))
    head, told = b"", False
    async for data in _streamed(agent, _payload(FileOp.READ, path, user, *extra)):
        if not told:
            head += data
            with _agents_own():
                cut = wire.field_end(head)
                name = "" if cut is None else Fields(head[:cut]).text(Tag.SOURCE)
            if cut is None:
                continue
            told, data = True, head[cut:]
            if opened is not None:
                opened(name)
        if data:
            yield data


async def write(
    agent: AgentClient, path: str, chunks: AsyncIterator[bytes], *, user: str,
    mode: int | None = None, append: bool = False, mtime_ns: int | None = None,
    sparse: bool = False, key: str | None = None,
) -> FileInfo:  # fmt: skip
    """Atomic unless ``append``; an error of ``chunks`` leaves the old file as it was."""
    extra = [wire.field(Tag.APPEND, int(append)), wire.field(Tag.SPARSE, int(sparse))]
    if mode is not None:
        extra.append(wire.field(Tag.MODE, mode))
    if mtime_ns is not None:
        extra.append(wire.field(Tag.TIME_NS, mtime_ns))
    if key is not None:
        extra.append(wire.field(Tag.KEY, key))
    payload = _payload(FileOp.WRITE, path, user, *extra)
    return info_of(await agent.run(Msg.FILE, payload, _no_output, stdin=chunks), path)


async def resume_input(
    agent: AgentClient, key: str, io: ResumeIO, chunks: AsyncIterator[bytes]
) -> FileInfo | None:
    """Goes on with a write or an unpacking of an earlier edge process; ``None`` when the
    agent does not know it."""
    known = [op for op in await agent.list() if op.key == key]
    if not known:
        return None
    await io.resumes(taken=known[0].taken, terminal=False)
    result = await agent.attach(known[0].id, _no_output, stdin=chunks)
    return info_of(result, result.text(Tag.NAME))


async def stat(agent: AgentClient, path: str, *, user: str) -> FileInfo:
    return info_of(await _simple(agent, _payload(FileOp.STAT, path, user)), path)


async def _entries(stream: AsyncIterator[bytes]) -> AsyncIterator[list[Fields]]:
    """Whole entries as they come."""
    held = b""
    async for data in stream:
        held += data
        with _agents_own():
            cut = wire.entries_end(held)
            if len(held) - cut > ENTRY_BYTES_MAX:
                raise ProtocolError("an entry without end")
            found = list(wire.split_entries(held[:cut]))
        held = held[cut:]
        if found:
            yield found


async def list_dir(
    agent: AgentClient, path: str, *, user: str, recursive: bool = False
) -> AsyncIterator[list[FileInfo]]:
    """The entries of a directory, or of all below it, in batches."""
    payload = _payload(FileOp.LIST, path, user, wire.field(Tag.RECURSIVE, int(recursive)))
    base = path.rstrip("/")
    async for entries in _entries(_streamed(agent, payload)):
        yield [info_of(r, f"{base}/{r.text(Tag.NAME)}") for r in entries]


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


def pack(
    agent: AgentClient, path: str, names: bytes, *, user: str, contents: bool = True
) -> AsyncIterator[bytes]:
    """A bundle of the files ``names`` (a zero byte behind each) below ``path``."""

    async def given() -> AsyncIterator[bytes]:
        yield names

    extra = () if contents else (wire.field(Tag.LENGTH, 0),)
    return _streamed(agent, _payload(FileOp.PACK, path, user, *extra), given)


async def unpack(
    agent: AgentClient, path: str, chunks: AsyncIterator[bytes], *, user: str,
    key: str | None = None,
) -> FileInfo:  # fmt: skip
    """Lays out a bundle below ``path``."""
    extra = () if key is None else (wire.field(Tag.KEY, key),)
    payload = _payload(FileOp.UNPACK, path, user, *extra)
    return info_of(await agent.run(Msg.FILE, payload, _no_output, stdin=chunks), path)


async def watch(
    agent: AgentClient, path: str, *, user: str, recursive: bool = True
) -> AsyncIterator[list[FileChange]]:
    """What changes below a directory, as it changes."""
    payload = _payload(FileOp.WATCH, path, user, wire.field(Tag.RECURSIVE, int(recursive)))
    base = path.rstrip("/")
    async for entries in _entries(_streamed(agent, payload)):
        yield [_change(entry, base) for entry in entries]


def _change(record: Fields, base: str) -> FileChange:
    name = record.text(Tag.NAME)
    path = f"{base}/{name}" if name else base or "/"
    info = info_of(record, path) if Tag.TYPE in record else None
    return FileChange(CHANGES.get(record.text(Tag.CHANGE), "overflow"), path, info)
