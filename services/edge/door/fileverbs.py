"""What each file verb at the door does with a sandbox.

Owns: translating file requests to driver calls and outcomes to frames and final
replies; what goes on after an edge was restarted and what begins again. Does not own:
who may call, idempotency, frames.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec

from schemas.base import encode
from schemas.exec import (
    INLINE_BYTES,
    FileEntry,
    FileEvent,
    FileReply,
    FileRequest,
    plain_name,
    whole_name,
)
from services.edge.door.operation import Operation
from services.edge.drivers.base import Handle
from services.edge.drivers.files import FileChange, FileInfo, Files, FileTrees
from services.edge.drivers.offers import offered
from services.edge.sandbox.actor import Sandbox
from shared.errors import Conflict, Internal, InvalidRequest, Unsupported

INLINE_ENTRIES = 200
"""Entries up to this many come in the final reply."""
LINES_BYTES = 128 * 1024
"""A frame of lines is sent when it holds this much; one line is at most 32 KiB."""


def _files(sandbox: Sandbox) -> tuple[Files, Handle]:
    driver = offered(sandbox.driver, Files)
    if driver is None:
        raise Unsupported(f"backend {sandbox.backend} has no files", field="backend")
    return driver, sandbox.present()


def _trees(sandbox: Sandbox) -> tuple[FileTrees, Handle]:
    driver = offered(sandbox.driver, FileTrees)
    if driver is None:
        raise Unsupported(f"backend {sandbox.backend} has single files only", field="backend")
    return driver, sandbox.present()


def _path(request: FileRequest) -> str:
    return whole_name(request.path, request.raw_path)


def _only_whole(op: Operation) -> None:
    """Raises where the client has a part of an output that another process made."""
    if op.have[0]:
        raise Conflict(
            "the edge was restarted, the rest of this output is not to be had",
            details={"errno": "ESTALE"},
        )


async def read(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_read``: small content in the reply, else in frames."""
    files, handle = _files(sandbox)
    before = op.have[0]
    if before and op.source is None:
        _only_whole(op)
    op.goes_on()

    def opened(source: str) -> None:
        op.source = source

    held, size = bytearray(), 0
    chunks = files.read(
        handle, _path(request), user=request.user, offset=request.offset + before,
        length=None if request.length is None else max(request.length - before, 0),
        source=op.source if before else None, opened=opened,
    )  # fmt: skip
    async for chunk in chunks:
        size += len(chunk)
        if size <= INLINE_BYTES:
            held += chunk
            continue
        if held:
            await op.output("stdout", bytes(held))
            held.clear()
        await op.output("stdout", chunk)
    inline = size <= INLINE_BYTES
    return FileReply(
        op_id=request.op_id, size=before + size, data=bytes(held) if inline else None
    )


async def write(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_write``: success means that the bytes are in the sandbox, all of them."""
    files, handle = _files(sandbox)
    goes_on = await _begin_input(sandbox, request, op)
    if goes_on is not None:
        return goes_on
    info = await files.write(
        handle, _path(request), _sized(op, request.size), user=request.user,
        mode=request.mode, append=request.append, mtime_ns=request.mtime_ns,
        sparse=request.sparse, key=_key(request),
    )  # fmt: skip
    return _written(request, op, info)


def _key(request: FileRequest) -> str | None:
    """What a later edge process finds the operation by, where its input streams."""
    return request.op_id if request.data is None else None


async def _begin_input(
    sandbox: Sandbox, request: FileRequest, op: Operation
) -> FileReply | None:
    """Input is wanted from here on. The reply, where an earlier process began it."""
    if request.data is not None:
        op.preset(request.data)
        return None
    op.terminal = True  # a client that says nothing more will send nothing more
    if op.again:
        reply = await resume_input(sandbox, request, op)
        if reply is not None:
            return reply
    await op.want_input()
    return None


async def resume_input(
    sandbox: Sandbox, request: FileRequest, op: Operation
) -> FileReply | None:
    """Goes on with an input of an earlier edge process; ``None`` where nobody knows it."""
    driver = offered(sandbox.driver, FileTrees)
    if request.data is not None or driver is None:
        return None
    op.terminal = op.resumed = op.takes_input = True
    chunks = _sized(op, request.size)
    info = await driver.resume_input(sandbox.present(), op.op_id, op, chunks)
    return None if info is None else _written(request, op, info)


def _written(request: FileRequest, op: Operation, info: FileInfo) -> FileReply:
    if info.type == "file" and not request.append and info.size != op.taken:
        raise Internal(f"{op.taken} bytes were sent, the file has {info.size}", field="path")
    return FileReply(op_id=request.op_id, entry=entry(info), size=op.taken)


async def _sized(op: Operation, size: int | None) -> AsyncIterator[bytes]:
    async for chunk in op.input():
        if size is not None and op.taken > size:
            break
        yield chunk
    if size is not None and op.taken != size:  # raised inside the driver: nothing is kept
        raise InvalidRequest(f"{op.taken} bytes came, not the announced {size}", field="size")


async def stat(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_stat``."""
    files, handle = _files(sandbox)
    info = await files.stat(handle, _path(request), user=request.user)
    return FileReply(op_id=request.op_id, entry=entry(info), size=info.size)


async def list_(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_list``: few entries in the reply, else in frames."""
    files, handle = _files(sandbox)
    _only_whole(op)
    held: list[FileEntry] = []
    count = 0
    batches = files.list(handle, _path(request), user=request.user, recursive=request.recursive)
    async for batch in batches:
        count += len(batch)
        held += map(entry, batch)
        if count > INLINE_ENTRIES:
            await _lines(op, held)
            held.clear()
    inline = count <= INLINE_ENTRIES
    return FileReply(op_id=request.op_id, entries=held if inline else None, size=count)


async def _lines(op: Operation, values: Sequence[msgspec.Struct]) -> None:
    """JSON lines, whole ones in every frame."""
    held = bytearray()
    for value in values:
        held += encode(value) + b"\n"
        if len(held) >= LINES_BYTES:
            await op.output("stdout", bytes(held))
            held.clear()
    if held:
        await op.output("stdout", bytes(held))


async def mkdir(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_mkdir``."""
    files, handle = _files(sandbox)
    mode = 0o755 if request.mode is None else request.mode
    await files.mkdir(
        handle, _path(request), user=request.user, mode=mode, parents=request.parents
    )
    return FileReply(op_id=request.op_id)


async def remove(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_remove``."""
    files, handle = _files(sandbox)
    await files.remove(
        handle, _path(request), user=request.user, recursive=request.recursive
    )
    return FileReply(op_id=request.op_id)


async def move(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_move``."""
    files, handle = _files(sandbox)
    target = whole_name(request.target or "", request.raw_target)
    await files.move(handle, _path(request), target, user=request.user)
    return FileReply(op_id=request.op_id)


def check_move(request: FileRequest) -> None:
    """Raises ``InvalidRequest`` naming the field."""
    if request.target is None:
        raise InvalidRequest("where to?", field="target")


async def pack(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_pack``: a bundle in frames."""
    trees, handle = _trees(sandbox)
    _only_whole(op)
    size = 0
    chunks = trees.pack(
        handle, _path(request), request.data or b"", user=request.user,
        contents=request.length != 0,
    )  # fmt: skip
    async for chunk in chunks:
        size += len(chunk)
        await op.output("stdout", chunk)
    return FileReply(op_id=request.op_id, size=size)


def check_pack(request: FileRequest) -> None:
    """Raises ``InvalidRequest`` naming the field."""
    if not request.data or len(request.data) > INLINE_BYTES:
        raise InvalidRequest(f"names of 1 to {INLINE_BYTES} bytes", field="data")


async def unpack(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_unpack``: a bundle is laid out."""
    trees, handle = _trees(sandbox)
    goes_on = await _begin_input(sandbox, request, op)
    if goes_on is not None:
        return goes_on
    info = await trees.unpack(
        handle, _path(request), _sized(op, request.size), user=request.user, key=_key(request)
    )
    return _written(request, op, info)


async def watch(sandbox: Sandbox, request: FileRequest, op: Operation) -> FileReply:
    """``file_watch``: changes in frames until the client cancels."""
    trees, handle = _trees(sandbox)
    path = _path(request)
    op.terminal = True
    op.goes_on()
    missed = bool(op.have[0])  # nobody looked while the edge was away
    async for changes in trees.watch(
        handle, path, user=request.user, recursive=request.recursive
    ):
        events = [_event(change) for change in changes]
        if missed:  # told once it is watched again: who looks then misses nothing
            events.append(_event(FileChange("overflow", path)))
            missed = False
        await _lines(op, events)
    return FileReply(op_id=request.op_id)


def _event(change: FileChange) -> FileEvent:
    path, raw = plain_name(change.path)
    return FileEvent(
        change=change.change, path=path, raw_path=raw,
        entry=None if change.info is None else entry(change.info),
    )  # fmt: skip


def entry(info: FileInfo) -> FileEntry:
    """The wire form of a file."""
    path, raw_path = plain_name(info.path)
    target, raw_target = (None, None) if info.target is None else plain_name(info.target)
    return FileEntry(
        path=path, type=info.type, size=info.size, mode=info.mode, uid=info.uid,
        gid=info.gid, mtime=info.mtime, target=target, raw_path=raw_path,
        raw_target=raw_target, ino=info.ino, nlink=info.nlink, mtime_ns=info.mtime_ns,
        ctime_ns=info.ctime_ns,
    )  # fmt: skip
