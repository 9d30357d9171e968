"""Layers whose metadata is on this node, each a file in the service's folder.

Owns: fetching and verifying metadata, numbers of files for the kernel. Does not own: data
(chunks), room on the disk (cache). A layer's digest covers its metadata image, which names
the list of chunk digests, so nothing the store says is taken on trust.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from services.edge.layers import fuse
from services.edge.layers.cache import META, LayerCache
from services.edge.layers.faults import Faults
from services.edge.layers.settings import Settings
from shared.blobs.base import Content, LayerReader
from shared.blobs.layout import (
    CHUNK_DIGEST_BYTES,
    CHUNKS_NAME,
    DATA_CHUNK_BYTES,
    FIRST_MAX,
    MANIFEST_NAME,
    MANIFEST_VERSION,
    META_NAME,
    Damaged,
    LayerManifest,
    is_digest,
    read_manifest,
)
from shared.errors import (
    CapacityExhausted,
    DeadlineExceeded,
    DsecError,
    InvalidRequest,
    NotFound,
    Unavailable,
    Unsupported,
)

PIECE_BYTES = 1024 * 1024
PIECES = 8
"""Of metadata, fetched side by side; all are in memory at once."""
HEADS, LIST_BYTES = 4, 64 * 1024
"""Pieces of metadata, and bytes of chunk digests, asked for before their sizes are known: most
layers have no more, and their metadata then comes in one trip, before data competes with it.
A piece that lies behind the end costs the store an answer."""
NODE_DIGITS = 14
"""Hex digits of a digest in a file's number: 56 bits."""
_SUPER, _SLOT_BYTES, _SLOTS_AT = 1024, 128, 0x58
"""Of EROFS: where the super block is, the size of a device's entry, where its place is told."""
RETRY_S = 0.2
LISTS_MAX = 64
"""Lists of chunk digests in memory, 1.3 MB for each 10 GiB of a layer."""


@dataclass(frozen=True, slots=True)
class Known:
    """A layer with its metadata on this node; ``chunks`` of ``data_bytes`` in all. ``first``:
    those that the store says are wanted first."""

    digest: str
    node: int
    data_bytes: int
    folder: Path
    first: Sequence[int] = ()

    @property
    def chunks(self) -> int:
        return -(-self.data_bytes // DATA_CHUNK_BYTES)

    @property
    def meta(self) -> Path:
        return self.folder / META_NAME

    def chunk_digest(self, index: int) -> bytes:
        """SHA-256 of a chunk, as the layer's digest vouches for it."""
        start = index * CHUNK_DIGEST_BYTES
        return _digests(self.folder / CHUNKS_NAME)[start : start + CHUNK_DIGEST_BYTES]


@lru_cache(LISTS_MAX)
def _digests(path: Path) -> bytes:
    """A list that was verified; another layer's has another path."""
    return path.read_bytes()


Here = asyncio.Future[None]
Coming = Callable[[Known, Here], None]
"""Told of a layer whose metadata is being fetched; the future is done when that is here, and
verified."""
Head = asyncio.Task[Content]


@dataclass(frozen=True, slots=True)
class _Heads:
    """What is asked for beside the manifest, which alone says how much there is."""

    meta: Sequence[Head]
    listed: Head

    def cancel(self) -> None:
        for head in (*self.meta, self.listed):
            head.cancel()


class Catalog:
    """The layers of this node."""

    def __init__(
        self, reader: LayerReader, cache: LayerCache, *, settings: Settings, faults: Faults,
        coming: Coming = lambda known, here: None,
    ) -> None:  # fmt: skip
        self._reader, self._cache, self._settings, self._faults = reader, cache, settings, faults
        self._told_coming = coming
        self._by_node: dict[int, Known] = {}
        self._coming: dict[str, asyncio.Task[Known]] = {}
        for digest in cache.layers():
            self._know(digest)

    def by_node(self, node: int) -> Known | None:
        return self._by_node.get(node)

    def by_name(self, name: str) -> Known | None:
        """The layer whose file has this name: its digest."""
        known = self._by_node.get(_node(name)) if is_digest(name) else None
        return known if known is not None and self._cache.has((name, META)) else None

    async def prepare(self, digest: str) -> Known:
        """The layer, its metadata fetched where it is not here. Raises ``NotFound``,
        ``Unavailable`` or ``DeadlineExceeded``, all with cause ``image``."""
        if not is_digest(digest):
            raise InvalidRequest(f"{digest!r} is not a layer digest", field="layers")
        known = self.by_name(digest)
        if known is not None:
            self._cache.touch(digest)
            return known
        task = self._coming.get(digest)
        if task is None:
            task = self._coming[digest] = asyncio.create_task(self._bounded(digest))
            task.add_done_callback(lambda _: self._coming.pop(digest, None))
        return await asyncio.shield(task)

    async def _bounded(self, digest: str) -> Known:
        limit_s = self._settings.layers_prepare_deadline_s
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await self._fetch(digest)
                    except Unavailable as error:
                        self._faults.tell("unavailable", digest, META, error.message)
                        await asyncio.sleep(RETRY_S)
        except TimeoutError:
            message = f"no metadata of layer {digest} in {limit_s:g} s"
            raise DeadlineExceeded(message, cause="image") from None
        except NotFound as error:
            message = f"layer {digest} is not in the store"
            raise NotFound(message, cause="image", is_infra=True) from error

    async def _fetch(self, digest: str) -> Known:
        heads = _Heads(
            [
                _begun(self._reader.fetch(digest, META_NAME, at * PIECE_BYTES, PIECE_BYTES))
                for at in range(HEADS)
            ],
            _begun(self._reader.fetch(digest, CHUNKS_NAME, 0, LIST_BYTES)),
        )
        try:
            return await self._described_by(await self._reader.fetch_manifest(digest), heads)
        finally:
            heads.cancel()

    async def _described_by(self, manifest: LayerManifest, heads: _Heads) -> Known:
        digest = manifest.digest
        _check(manifest, digest, self._settings.layers_meta_bytes_max)
        here: Here = asyncio.get_running_loop().create_future()
        here.add_done_callback(asyncio.Future.exception)
        self._told_coming(self._described(manifest), here)
        try:
            known = await self._whole(manifest, heads)
            here.set_result(None)
            return known
        finally:
            if not here.done():
                here.set_exception(Unavailable(f"no metadata of layer {digest}", cause="image"))

    async def _whole(self, manifest: LayerManifest, heads: _Heads) -> Known:
        digest = manifest.digest
        work = Path(tempfile.mkdtemp(dir=self._cache.root))
        try:
            tag, listed = await _together(
                self._meta(manifest, work / META_NAME, heads.meta),
                self._listed(manifest, heads.listed),
            )
            await self._chunk_digests(manifest, tag, listed, work / CHUNKS_NAME)
            (work / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
            self._place(work, digest)
        except OSError as error:
            message = f"layer {digest} cannot be kept here: {error.strerror}"
            raise CapacityExhausted(message, field="disk") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        self._cache.add_layer(digest)
        return self._know(digest)

    def _place(self, work: Path, digest: str) -> None:
        work.chmod(0o700)
        folder = self._cache.folder(digest)
        if folder.exists():
            shutil.rmtree(folder)
        work.rename(folder)
        _digests.cache_clear()  # it may be there anew because its list was damaged

    async def _meta(self, manifest: LayerManifest, path: Path, heads: Sequence[Head]) -> bytes:
        """Fetches the metadata image; returns the digest it has of the chunk digests. A piece
        is digested and written while the next ones come."""
        self._cache.make_room(manifest.meta_bytes)
        for attempt in (1, 2):
            hasher = hashlib.sha256()
            path.unlink(missing_ok=True)
            start = 0
            for head in heads:
                there = await _of(head, min(PIECE_BYTES, manifest.meta_bytes - start))
                if not there:
                    break
                await asyncio.to_thread(_append, path, [there], hasher)
                start += len(there)
            heads = ()
            starts = range(start, manifest.meta_bytes, PIECE_BYTES)
            for at in range(0, len(starts), PIECES):
                await self._pieces(manifest, starts[at : at + PIECES], path, hasher)
            if hasher.hexdigest() == manifest.digest:
                return _device_tag(path)
            self._damaged(manifest.digest, "metadata", final=attempt == 2)
        raise AssertionError("unreachable")

    async def _pieces(
        self, manifest: LayerManifest, starts: range, path: Path, hasher: hashlib._Hash
    ) -> None:
        """Some of the metadata's pieces, fetched side by side."""
        digest, size = manifest.digest, manifest.meta_bytes
        pieces = await _together(
            *(
                self._reader.fetch(digest, META_NAME, start, min(PIECE_BYTES, size - start))
                for start in starts
            )
        )
        await asyncio.to_thread(_append, path, pieces, hasher)

    async def _listed(self, manifest: LayerManifest, head: Head | None = None) -> Content:
        """The digests of the data's chunks, whatever they are."""
        size = -(-manifest.data_bytes // DATA_CHUNK_BYTES) * CHUNK_DIGEST_BYTES
        there = await _of(head, size) if head is not None else b""
        if len(there) == size:
            return there
        return await self._reader.fetch(manifest.digest, CHUNKS_NAME, 0, size)

    async def _chunk_digests(
        self, manifest: LayerManifest, tag: Content, listed: Content, path: Path
    ) -> None:
        """Keeps ``listed`` if it is what the metadata says, fetched once more if not."""
        if not manifest.data_bytes:
            return
        count = -(-manifest.data_bytes // DATA_CHUNK_BYTES)
        for attempt in (1, 2):
            right = hashlib.sha256(listed).hexdigest().encode() == tag
            if right and len(listed) == count * CHUNK_DIGEST_BYTES:
                path.write_bytes(listed)
                return
            self._damaged(manifest.digest, "list of chunks", final=attempt == 2)
            listed = await self._listed(manifest)

    def _damaged(self, digest: str, what: str, *, final: bool) -> None:
        if final:
            message = f"the {what} of layer {digest} is damaged in the store"
            self._faults.tell("damaged", digest, META, message)
            raise Damaged(message, cause="image")

    def _know(self, digest: str) -> Known:
        folder = self._cache.folder(digest)
        try:
            manifest = read_manifest((folder / MANIFEST_NAME).read_bytes(), digest)
        except OSError as error:
            raise Unavailable(f"layer {digest} is damaged on this node", cause="image") from error
        known = self._described(manifest)
        self._by_node[known.node] = known
        return known

    def _described(self, manifest: LayerManifest) -> Known:
        digest = manifest.digest
        return Known(
            digest, _node(digest), manifest.data_bytes, self._cache.folder(digest),
            manifest.first[:FIRST_MAX],
        )  # fmt: skip


def _begun(fetch: Coroutine[Any, Any, Content]) -> Head:
    head = asyncio.create_task(fetch)
    head.add_done_callback(lambda done: done.cancelled() or done.exception())
    return head


async def _of(head: Head, size: int) -> Content:
    """Its ``size`` bytes; none where it did not come whole: it is asked for again then."""
    try:
        there = await head if size else b""
    except DsecError:
        return b""
    return there[:size] if len(there) >= size else b""


async def _together(*fetches: Coroutine[Any, Any, Content]) -> list[Content]:
    """What all of them come to, side by side: each costs a trip to the store. The first
    error ends the others."""
    tasks = [asyncio.create_task(fetch) for fetch in fetches]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _append(path: Path, pieces: Sequence[Content], hasher: hashlib._Hash) -> None:
    with open(path, "ab") as file:
        for piece in pieces:
            hasher.update(piece)
            file.write(piece)


def _node(digest: str) -> int:
    return int(digest[:NODE_DIGITS], 16) + fuse.ROOT_NODE + 1


def _check(manifest: LayerManifest, digest: str, meta_bytes_max: int) -> None:
    if manifest.version != MANIFEST_VERSION or manifest.data_chunk_bytes != DATA_CHUNK_BYTES:
        raise Unsupported(f"layer {digest} was made by another version", cause="image")
    if not 0 < manifest.meta_bytes <= meta_bytes_max:
        message = f"the manifest of layer {digest} is damaged in the store"
        raise Damaged(message, cause="image")


def _device_tag(path: Path) -> bytes:
    """What a verified metadata image says of its data; empty where it has none."""
    with open(path, "rb") as file:
        devices, slot = _slots(os.pread(file.fileno(), 4, _SUPER + _SLOTS_AT - 2))
        return os.pread(file.fileno(), 64, slot * _SLOT_BYTES) if devices else b""


def _slots(raw: bytes) -> tuple[int, int]:
    return int.from_bytes(raw[:2], "little"), int.from_bytes(raw[2:], "little")


