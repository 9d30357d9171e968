"""Copies of one file that a later call goes on with.

Owns: the parts that a broken copy leaves, and when they may be gone on with. Does not own:
one call's own persistence (:mod:`libdsec._local`).

A part is named after both files, and after what tells a changed source from an unchanged
one: its size, inode and times. So a part is only ever continued from the file it is a part
of. Bytes get into a part in order, so its length says how much of it is right; where it
turns out longer than the source, it is begun again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from libdsec import _local
from libdsec._filecalls import FileCalls, info_of, persistent
from libdsec._local import Taken
from libdsec._wire import CHUNK_BYTES
from libdsec.errors import FileChanged, InternalError, NotFound
from libdsec.results import FileInfo

SUFFIX = ".dsec-part"


async def download(
    calls: FileCalls, remote: str, target: Path, *, user: str | None, report: Taken
) -> int:
    """As :func:`libdsec._local.download`; what a failure leaves is a part beside
    ``target``, except of a symbolic link. Bytes of the whole file."""
    if (await _stat(calls, remote, user)).type == "symlink":
        return await _local.download(calls, remote, target, user=user, report=report)
    _local.regular_or_free(target)

    async def attempt() -> int:
        report.back()
        facts = await _stat(calls, remote, user)
        part = target.with_name(_name(target.name, remote, *_identity(facts)))
        with part.open("ab") as sink:
            have = sink.tell()
        if have > facts.size:
            os.truncate(part, 0)
            have = 0
        report(have)
        with part.open("r+b") as sink:
            sink.seek(have)
            async for data in calls.content(remote, user=user, offset=have):
                await asyncio.to_thread(_local.put, sink, data)
                report(len(data))
            sink.truncate(facts.size)
        if _identity(await _stat(calls, remote, user)) != _identity(facts):
            part.unlink()
            raise FileChanged(f"{remote} changed while it was copied", path=remote)
        part.replace(target)
        return facts.size

    return await persistent(attempt)


async def upload(
    calls: FileCalls, source: BinaryIO, remote: str, *, user: str | None, report: Taken,
    mode: int | None,
) -> int:  # fmt: skip
    """As :func:`libdsec._local.upload`; what a failure leaves is a part beside ``remote``,
    also where the local file has changed since. Bytes of the whole file."""

    async def attempt() -> int:
        report.back()
        first = os.fstat(source.fileno())
        size, state = first.st_size, _local.state_of(source)
        place = PurePosixPath(remote)
        facts = (size, first.st_ino, first.st_mtime_ns, first.st_ctime_ns)
        part = str(place.with_name(_name(place.name, str(source.name), *facts)))
        chosen = stat.S_IMODE(first.st_mode) if mode is None else mode
        have = await _length(calls, part, user)
        if have is None or have > size:  # more than there is: two were at it
            await calls.call("file_write", part, data=b"", size=0, user=user, mode=chosen)
            have = 0
        report(have)

        async def rest() -> AsyncIterator[bytes]:
            source.seek(have)
            left = size - have
            while left and (data := await asyncio.to_thread(source.read, min(CHUNK_BYTES, left))):
                left -= len(data)
                yield data
                report(len(data))

        await calls.input("file_write", part, rest, append=True, user=user, mode=chosen)
        if _local.state_of(source) != state or await _length(calls, part, user) != size:
            await calls.call("file_remove", part, recursive=False, user=user)
            raise FileChanged(f"{source.name} changed while it was copied", path=str(source.name))
        await calls.call("file_move", part, target=remote, user=user)
        return size

    return await persistent(attempt)


async def _stat(calls: FileCalls, path: str, user: str | None) -> FileInfo:
    reply = await calls.call("file_stat", path, user=user)
    if reply.entry is None:
        raise InternalError(f"{path}: the answer has no entry")
    return info_of(reply.entry)


async def _length(calls: FileCalls, path: str, user: str | None) -> int | None:
    try:
        return (await _stat(calls, path, user)).size
    except NotFound:
        return None


def _identity(facts: FileInfo) -> tuple[int, int, int, int]:
    return facts.size, facts.ino, facts.mtime_ns, facts.ctime_ns


def _name(*facts: str | int) -> str:
    digest = hashlib.sha256("\0".join(map(str, facts)).encode(errors="surrogateescape"))
    return f".{digest.hexdigest()[:32]}{SUFFIX}"
