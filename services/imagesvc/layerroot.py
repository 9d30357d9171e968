"""A stored layer's root, to be read here.

Owns: getting a layer of a remote store whole and checked. Does not own: the mount, what
reads it.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from shared.blobs.base import BlobStore
from shared.blobs.folder import FolderStore
from shared.blobs.layout import CHUNKS_NAME, DATA_NAME, META_NAME, Damaged, LayerManifest
from shared.erofs.kernelmount import mounted_layer

FETCH_BYTES = 8 * 1024 * 1024


@contextmanager
def opened_layer(
    store: BlobStore, digest: str, work: Path, *, tick: Callable[[int], None]
) -> Iterator[int]:
    """A descriptor on the root of a layer. ``work`` has room for a layer that must be
    fetched. Raises ``NotFound``, ``Unavailable``, ``Damaged``, ``Unsupported``."""
    if isinstance(store, FolderStore):
        paths = store.paths(digest)
        with mounted_layer(paths.meta, paths.data) as root_fd:
            yield root_fd
        return
    manifest = store.manifest(digest)
    with TemporaryDirectory(dir=work, prefix="layer-") as made:  # one may be there twice
        folder = Path(made)
        asyncio.run(_fetch(store, manifest, folder, tick))  # we are in a thread
        data = folder / DATA_NAME if manifest.data_bytes else None
        with mounted_layer(folder / META_NAME, data) as root_fd:
            yield root_fd


async def _fetch(
    store: BlobStore, manifest: LayerManifest, folder: Path, tick: Callable[[int], None]
) -> None:
    digest = manifest.digest
    meta = await _whole(store, digest, META_NAME, manifest.meta_bytes)
    if hashlib.sha256(meta).hexdigest() != digest:
        raise Damaged(f"the metadata of layer {digest} is damaged in the store", cause="image")
    (folder / META_NAME).write_bytes(meta)
    if not manifest.data_bytes:
        return
    size = manifest.data_chunk_bytes
    count = -(-manifest.data_bytes // size)
    chunks = await _whole(store, digest, CHUNKS_NAME, count * 32)
    tag = hashlib.sha256(chunks).hexdigest()
    if tag != manifest.data_digest or tag.encode() not in meta:
        raise Damaged(f"the digests of layer {digest} are damaged in the store", cause="image")
    with (folder / DATA_NAME).open("wb") as file:
        for start in range(0, manifest.data_bytes, FETCH_BYTES):
            length = min(FETCH_BYTES, manifest.data_bytes - start)
            data = await store.fetch(digest, DATA_NAME, start, length)
            for at in range(0, length, size):
                number = (start + at) // size
                expected = chunks[number * 32 : number * 32 + 32]
                if hashlib.sha256(data[at : at + size]).digest() != expected:
                    raise Damaged(f"chunk {number} of layer {digest} is damaged in the store",
                                  cause="image")  # fmt: skip
            file.write(data)
            tick(0)


async def _whole(store: BlobStore, digest: str, name: str, size: int) -> bytes:
    pieces = [
        await store.fetch(digest, name, at, min(FETCH_BYTES, size - at))
        for at in range(0, size, FETCH_BYTES)
    ]
    return b"".join(pieces)
