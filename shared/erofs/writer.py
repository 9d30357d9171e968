"""A layer's two files: metadata image and data blob.

Owns: reading a tree's contents once, block placement, sharing of equal files,
holes, the blob's chunk digests, the layer's digest, the check of the result.
Does not own: the format (:mod:`shared.erofs.format`), where layers are
kept (:mod:`shared.blobs`).

The metadata image is written here instead of by ``mkfs.erofs``: version 1.5 reads
only unpacked trees, so that each archive would be written to disk twice, and its
output depends on the order of the directory. This way a layer is a function of
its tree: equal trees have equal digests.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import BinaryIO

from shared.blobs.layout import (
    CHUNKS_NAME,
    DATA_CHUNK_BYTES,
    DATA_NAME,
    FIRST_MAX,
    META_NAME,
    LayerFiles,
)
from shared.erofs import verify as verification
from shared.erofs.datablob import DataBlob
from shared.erofs.format import BLOCK_BYTES, HOLE, Placement, encode
from shared.erofs.layertree import Inode, unique_inodes
from shared.errors import InvalidRequest, Unsupported

INLINE_MAX_BYTES = 1024  # smaller files live in the metadata, which nodes have locally
SHARED_MAX_BYTES = verification.DIGESTED_WHOLE_MAX_BYTES  # equal files up to this: stored once
READ_BYTES = 1024 * 1024
BESIDE_MIN_BYTES = 64 * 1024  # handing the digest of a smaller file to a thread costs as much
CHUNKS_PER_FILE_MAX = 16384  # of a sparse file; bounds its index to 128 KiB

Progress = Callable[[int], None]
"""Called with the bytes done since the last call; may raise to cancel."""


def build_layer(
    root: Inode, out_dir: Path, *, verify: bool = True, progress: Progress | None = None,
    together: Sequence[Inode] = (), first: Sequence[Inode] = (), durable: bool = False,
) -> LayerFiles:  # fmt: skip
    """Write ``root`` as a layer into the empty directory ``out_dir``.

    With ``verify`` the result is mounted by the kernel and each entry, attribute
    and content compared with the tree. ``together``: files of the tree that are mostly read
    together: their data lies at the blob's beginning. ``first``: files that are read first,
    those of other layers among them. ``durable``: the files are to stay on this disk, so the
    data is on its way there during the check. Raises :class:`InvalidRequest` (a source
    that ends early or changed), :class:`Unsupported` (values EROFS can't hold),
    ``Internal`` (the written layer differs), :class:`OSError` (disk).
    """
    tick = progress or (lambda done: None)
    inodes = list(unique_inodes(root))
    files = _in_order(inodes, together)
    with DataBlob(out_dir / DATA_NAME) as data:
        contents = _Contents(data, tick, (inode.size for _, inode in files))
        for path, inode in files:
            contents.store(path, inode)
    data_path = out_dir / DATA_NAME if data.blocks else None
    with _written_through(data_path) if durable else nullcontext():
        made = _finished(
            root, out_dir, data, contents, entries=len(inodes), first=contents.chunks_of(first)
        )
        if verify:
            verification.check_layer(
                root, made.meta_path, data_path, contents.digests(), tick=tick
            )
    return made


def _finished(
    root: Inode, out_dir: Path, data: DataBlob, contents: _Contents, *, entries: int,
    first: tuple[int, ...],
) -> LayerFiles:  # fmt: skip
    """The layer, once what belongs to its blob is written."""
    listed = b"".join(data.chunk_digests)
    digest = hashlib.sha256(listed).hexdigest() if data.blocks else ""
    meta = encode(
        root, contents.placements, data_blocks=data.blocks, data_tag=digest.encode("ascii")
    )
    _write_new(out_dir / META_NAME, meta)
    if data.blocks:
        _write_new(out_dir / CHUNKS_NAME, listed)
    else:
        (out_dir / DATA_NAME).unlink()
    return LayerFiles(
        digest=hashlib.sha256(meta).hexdigest(),
        meta_path=out_dir / META_NAME,
        data_path=out_dir / DATA_NAME if data.blocks else None,
        chunks_path=out_dir / CHUNKS_NAME if data.blocks else None,
        meta_bytes=len(meta),
        data_bytes=data.blocks * BLOCK_BYTES,
        data_digest=digest,
        entries=entries,
        first=first,
    )


def _in_order(
    inodes: Sequence[tuple[bytes, Inode]], together: Sequence[Inode]
) -> list[tuple[bytes, Inode]]:
    """The regular files, those of ``together`` first."""
    left = {id(one): (path, one) for path, one in inodes if one.is_regular}
    ahead = [left.pop(id(one)) for one in dict.fromkeys(together) if id(one) in left]
    return [*ahead, *left.values()]


@contextmanager
def _written_through(path: Path | None) -> Iterator[None]:
    """Writes a file to the disk beside what is done meanwhile. Whoever keeps it asks for the
    same once more, waits less, and hears of errors."""

    def sync(file: BinaryIO) -> None:
        with file, suppress(OSError):
            os.fsync(file.fileno())

    if path is None:
        yield
        return
    thread = Thread(target=sync, args=(path.open("rb"),), name="written through")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _write_new(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


class _Contents:
    """Reads regular files and decides where their bytes go."""

    def __init__(self, data: DataBlob, progress: Progress, sizes: Iterable[int]) -> None:
        self.placements: dict[int, Placement] = {}
        self._digests: dict[int, bytes] = {}
        self._beside: dict[int, hashlib._Hash] = {}  # those that the blob's thread takes
        self._data = data
        self._progress = progress
        self._sizes = Counter(sizes)
        self._by_digest: dict[bytes, Placement] = {}

    def digests(self) -> dict[int, bytes]:
        """Of the contents, by ``id(inode)``; known when the blob is written."""
        return self._digests | {key: digest.digest() for key, digest in self._beside.items()}

    def store(self, path: bytes, inode: Inode) -> None:
        """Copy one file's content to its place; the digest is taken from what was read."""
        if inode.size >= 1 << 62:
            raise Unsupported(f"{path!r}: a file of {inode.size} bytes")
        try:
            self.placements[id(inode)] = self._placement(inode, _Reader(path, inode))
            if inode.source is not None:
                inode.source.confirm()
        finally:
            if inode.source is not None:
                inode.source.close()
        self._progress(sum(extent.length for extent in inode.extents))

    def chunks_of(self, inodes: Sequence[Inode]) -> tuple[int, ...]:
        """The blob's chunks that hold these files, in their order, each once."""
        found: dict[int, None] = {}
        for inode in inodes:
            placement = self.placements.get(id(inode), Placement())
            span = min(inode.size, 1 << placement.chunk_bits) if placement.chunks else 0
            for block in placement.chunks:
                if block != HOLE:
                    start = block * BLOCK_BYTES
                    last = (start + span - 1) // DATA_CHUNK_BYTES
                    found.update(dict.fromkeys(range(start // DATA_CHUNK_BYTES, last + 1)))
        return tuple(found)[:FIRST_MAX]

    def _placement(self, inode: Inode, reader: _Reader) -> Placement:
        if inode.size <= SHARED_MAX_BYTES:
            return self._whole(inode, reader)
        if inode.has_holes:
            return self._sparse(inode, reader)
        return self._streamed(inode, reader)

    def _whole(self, inode: Inode, reader: _Reader) -> Placement:
        content = reader.read(0, inode.size)
        if inode.size >= BESIDE_MIN_BYTES and self._sizes[inode.size] == 1:  # no other is equal
            self._digest_beside(inode, content)
            return self._placed(content, inode)
        digest = self._digests[id(inode)] = hashlib.sha256(content).digest()
        known = self._by_digest.get(digest)
        if known is None:
            known = self._by_digest[digest] = self._placed(content, inode)
        return known

    def _digest_beside(self, inode: Inode, piece: bytes) -> None:
        digest = self._beside.get(id(inode))
        if digest is None:
            digest = self._beside[id(inode)] = hashlib.sha256()
        self._data.digest(digest.update, piece)

    def _placed(self, content: bytes, inode: Inode) -> Placement:
        if len(content) <= INLINE_MAX_BYTES:
            return Placement(inline=content)
        bits = chunk_bits(len(content), sparse=inode.has_holes)
        if not inode.has_holes:
            return Placement(chunk_bits=bits, chunks=(self._data.append(content),))
        span = 1 << bits
        chunks = [content[at : at + span] for at in range(0, len(content), span)]
        places = [HOLE if not any(chunk) else self._data.append(chunk) for chunk in chunks]
        return Placement(chunk_bits=bits, chunks=tuple(places))

    def _streamed(self, inode: Inode, reader: _Reader) -> Placement:
        first = self._data.blocks
        for at in range(0, inode.size, READ_BYTES):
            piece = reader.read(at, min(READ_BYTES, inode.size - at))
            self._digest_beside(inode, piece)
            self._data.append(piece)
            self._progress(0)
        return Placement(chunk_bits=chunk_bits(inode.size, sparse=False), chunks=(first,))

    def _sparse(self, inode: Inode, reader: _Reader) -> Placement:
        """A big file with holes, digested as :class:`verify.SparseDigest` does."""
        bits = chunk_bits(inode.size, sparse=True)
        span = 1 << bits
        digest = verification.SparseDigest()
        places = []
        for at in range(0, inode.size, span):
            length = min(span, inode.size - at)
            if not reader.has_data(at, length):
                places.append(HOLE)
                continue
            places.append(self._data.blocks)
            for piece_at in range(at, at + length, READ_BYTES):
                piece = reader.read(piece_at, min(READ_BYTES, at + length - piece_at))
                self._data.append(piece)
                digest.update(piece_at, piece)
                self._progress(0)
        self._digests[id(inode)] = digest.digest()
        return Placement(chunk_bits=bits, chunks=tuple(places))


def chunk_bits(size: int, *, sparse: bool) -> int:
    """One chunk for a file without holes, else the smallest chunks its index has room for."""
    count_max = CHUNKS_PER_FILE_MAX if sparse else 1
    needed = -(-size // count_max)
    return max(BLOCK_BYTES, needed - 1).bit_length() if needed > BLOCK_BYTES else 12


class _Reader:
    """Reads a file's logical bytes through its extents, zeros in between."""

    def __init__(self, path: bytes, inode: Inode) -> None:
        self._path = path
        self._inode = inode
        self._next = 0  # reads go forward, so earlier extents are done with

    def has_data(self, at: int, length: int) -> bool:
        self._skip_to(at)
        extents = self._inode.extents
        return self._next < len(extents) and extents[self._next].offset < at + length

    def _skip_to(self, at: int) -> None:
        extents = self._inode.extents
        while self._next < len(extents):
            extent = extents[self._next]
            if extent.offset + extent.length > at:
                break
            self._next += 1

    def read(self, at: int, length: int) -> bytes:
        """Exactly ``length`` bytes at ``at``; raises where the source has fewer."""
        self._skip_to(at)
        extents = self._inode.extents
        if self._next < len(extents):
            extent = extents[self._next]
            inside = at - extent.offset
            if inside >= 0 and inside + length <= extent.length:
                return self._exactly(length, extent.source_offset + inside)
        out = bytearray(length)
        for extent in extents[self._next :]:
            start, end = max(at, extent.offset), min(at + length, extent.offset + extent.length)
            if start >= at + length:
                break
            if start < end:
                source_at = extent.source_offset + start - extent.offset
                out[start - at : end - at] = self._exactly(end - start, source_at)
        return bytes(out)

    def _exactly(self, length: int, offset: int) -> bytes:
        source = self._inode.source
        if source is None:
            raise InvalidRequest(f"{self._path!r} has no content")
        data = source.pread(length, offset)
        while len(data) < length:
            more = source.pread(length - len(data), offset + len(data))
            if not more:
                shown = self._path.decode(errors="backslashreplace")
                raise InvalidRequest(f"{shown!r} ended early: source was cut or changed")
            data += more
        return data
