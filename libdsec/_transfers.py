"""Bytes to and from the image service, over the bus.

Owns: order, windows, going on where a transfer was, digests. Does not own: what the
bytes are. Memory is bounded by a window of pieces whatever the size.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from libdsec._core import Core
from libdsec._wire import (
    BLOB_CHUNK_BYTES,
    BLOB_WINDOW,
    Blob,
    BlobGet,
    BlobPiece,
    BlobPut,
    BlobState,
    blob,
)
from libdsec.errors import InternalError

PIECE_S = 60.0
"""Longest wait for one piece, over broken connections."""

Told = Callable[[int], None]
"""Called with the number of bytes that are done."""


def file_id(path: Path) -> str:
    """An upload's id by which a repetition finds what there is already of it."""
    at = path.stat()
    facts = f"{path.resolve()}\n{at.st_size}\n{at.st_mtime_ns}\n{at.st_ino}"
    return hashlib.sha256(facts.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def new_id() -> str:
    """The id of bytes that cannot be had again."""
    return secrets.token_hex(16)


def file_pieces(path: Path) -> Iterator[bytes]:
    """A file's bytes."""
    with path.open("rb") as file:
        while piece := file.read(BLOB_CHUNK_BYTES):
            yield piece


async def upload(core: Core, project: str, id: str, pieces: Iterator[bytes], told: Told) -> Blob:
    """Hands ``pieces`` over; those that are there already are only read and digested.
    Raises ``Unavailable`` where the connection stays away, ``Forbidden``."""
    subject = blob(project, "put", core.config.principal)
    digest, at = hashlib.sha256(), 0
    there = await _put(core, subject, BlobPut(id=id, offset=0))
    while True:
        window: list[BlobPut] = []
        while len(window) < BLOB_WINDOW:
            piece = await asyncio.to_thread(next, pieces, b"")
            if not piece:
                break
            digest.update(piece)
            if at + len(piece) > there:
                window.append(BlobPut(id=id, offset=at, data=piece))
            at += len(piece)
            told(min(at, there))
        if not window:
            return Blob(id=id, size_bytes=at, sha256=digest.hexdigest())
        there = await _put_window(core, subject, window)
        told(there)


async def _put_window(core: Core, subject: str, window: Sequence[BlobPut]) -> int:
    """All pieces of a window; returns how much there is then."""
    there = max(await asyncio.gather(*(_put(core, subject, piece) for piece in window)))
    for piece in window:  # what came before its turn was not taken
        if there < piece.offset + len(piece.data):
            there = await _put(core, subject, piece)
    end = window[-1].offset + len(window[-1].data)
    if there < end:
        raise InternalError(f"an upload stays at {there} of {end} bytes", retryable=True)
    return there


async def _put(core: Core, subject: str, piece: BlobPut) -> int:
    return (await core.calls.read(subject, piece, BlobState, timeout_s=PIECE_S)).size_bytes


async def download(core: Core, project: str, wanted: Blob, path: Path, told: Told) -> None:
    """Fetches an export to ``path``, which is there whole or as it was before."""
    subject = blob(project, "get", core.config.principal)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    digest = hashlib.sha256()
    try:
        with temporary.open("xb") as file:
            for start in range(0, wanted.size_bytes, BLOB_CHUNK_BYTES * BLOB_WINDOW):
                end = min(wanted.size_bytes, start + BLOB_CHUNK_BYTES * BLOB_WINDOW)
                offsets = range(start, end, BLOB_CHUNK_BYTES)
                pieces = await asyncio.gather(
                    *(_get(core, subject, wanted, offset) for offset in offsets)
                )
                for piece in pieces:
                    digest.update(piece)
                    await asyncio.to_thread(file.write, piece)
                told(end)
        if digest.hexdigest() != wanted.sha256:
            raise InternalError("the export arrived damaged", retryable=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


async def _get(core: Core, subject: str, wanted: Blob, offset: int) -> bytes:
    length = min(BLOB_CHUNK_BYTES, wanted.size_bytes - offset)
    ask = BlobGet(id=wanted.id, offset=offset, length=length)
    piece = await core.calls.read(subject, ask, BlobPiece, timeout_s=PIECE_S)
    if len(piece.data) != length:
        raise InternalError(f"an export ended at {offset + len(piece.data)} bytes", retryable=True)
    return piece.data
