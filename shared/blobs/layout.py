"""What a layer consists of in every store, and whether files are what they should be.

A layer is a folder ``layers/<digest>/`` of::

    meta.erofs      metadata image; its SHA-256 is the digest
    data.blob       contents (absent where all are in the metadata)
    chunks.sha256   32 bytes per 256 KiB of data.blob
    manifest.json   :class:`LayerManifest`; written last where a folder can't be renamed

The metadata image names the blob by the SHA-256 of ``chunks.sha256`` (its device tag), so
that one digest covers everything.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from shared.errors import Internal, InvalidRequest

META_NAME, DATA_NAME, CHUNKS_NAME = "meta.erofs", "data.blob", "chunks.sha256"
MANIFEST_NAME = "manifest.json"
NAMES = (META_NAME, DATA_NAME, CHUNKS_NAME, MANIFEST_NAME)
MANIFEST_VERSION = 1
DATA_CHUNK_BYTES = 256 * 1024
CHUNK_DIGEST_BYTES = 32
MANIFEST_BYTES_MAX = 64 * 1024
FIRST_MAX = 1024
"""Chunks that a manifest names as wanted first."""
FIRST_SHARE, FIRST_MIN = 0.1, 16
"""Of a layer's chunks, those that what was read may add to."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Damaged(Internal):
    """A store holds something else than was put."""


class LayerManifest(msgspec.Struct, frozen=True):
    """What a node must know to fetch, check and mount a layer. Sizes in bytes. ``first``:
    chunks that its readers want first, in that order; a hint, which nothing vouches for."""

    digest: str
    meta_bytes: int
    data_bytes: int
    data_digest: str
    entries: int
    data_chunk_bytes: int = DATA_CHUNK_BYTES
    version: int = MANIFEST_VERSION
    first: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.meta_bytes + self.data_bytes


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """A finished layer on the local disk: ``digest`` (hex) is the SHA-256 of the metadata image.

    The image carries ``data_digest``: the SHA-256 over the SHA-256 digests of the
    blob's chunks, which ``chunks_path`` lists. ``data_path`` is ``None`` where all
    contents are in the metadata.
    """

    digest: str
    meta_path: Path
    data_path: Path | None
    chunks_path: Path | None
    meta_bytes: int
    data_bytes: int
    data_digest: str
    entries: int
    first: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return self.meta_bytes + self.data_bytes

    def manifest(self) -> LayerManifest:
        return LayerManifest(
            digest=self.digest,
            meta_bytes=self.meta_bytes,
            data_bytes=self.data_bytes,
            data_digest=self.data_digest,
            entries=self.entries,
            first=self.first,
        )


def hinted(manifest: LayerManifest, first: Iterable[int]) -> LayerManifest:
    """``manifest`` with chunks that turned out to be read first, as far as there is room."""
    chunks = -(-manifest.data_bytes // manifest.data_chunk_bytes)
    most = min(FIRST_MAX, max(FIRST_MIN, int(FIRST_SHARE * chunks)))
    known = dict.fromkeys((*manifest.first, *(one for one in first if 0 <= one < chunks)))
    return replace(manifest, first=tuple(known)[: max(most, len(manifest.first))])


def files_in(folder: Path, manifest: LayerManifest) -> LayerFiles:
    """The files of a layer that came into ``folder``. Raises :class:`Damaged` where one
    is missing, or other than ``manifest`` says."""
    data, chunks = folder / DATA_NAME, folder / CHUNKS_NAME
    try:
        meta = (folder / META_NAME).read_bytes()
        check_meta(manifest, meta)
        if manifest.data_bytes:
            listed = chunks.read_bytes()
            check_chunks(manifest, listed)
            _check_data(manifest, listed, data)
    except FileNotFoundError as error:
        raise damaged(manifest.digest, f"{Path(error.filename).name} is missing") from error
    has_data = manifest.data_bytes > 0
    return LayerFiles(
        digest=manifest.digest, meta_path=folder / META_NAME, data_path=data if has_data else None,
        chunks_path=chunks if has_data else None, meta_bytes=manifest.meta_bytes,
        data_bytes=manifest.data_bytes, data_digest=manifest.data_digest,
        entries=manifest.entries, first=manifest.first,
    )  # fmt: skip


def check_meta(manifest: LayerManifest, meta: bytes) -> None:
    """Raises :class:`Damaged` where this is not the metadata of ``manifest``."""
    digest = hashlib.sha256(meta).hexdigest()
    if not is_digest(manifest.digest) or digest != manifest.digest:
        raise damaged(manifest.digest, "the metadata is another's")
    if len(meta) != manifest.meta_bytes or manifest.data_digest.encode() not in meta:
        raise damaged(manifest.digest, "the manifest and the metadata differ")


def check_chunks(manifest: LayerManifest, listed: bytes) -> None:
    """Raises :class:`Damaged` where this is not the list of the data's digests."""
    count = -(-manifest.data_bytes // DATA_CHUNK_BYTES)
    right = hashlib.sha256(listed).hexdigest() == manifest.data_digest
    if not right or len(listed) != count * CHUNK_DIGEST_BYTES:
        raise damaged(manifest.digest, "the digests of its data are another's")


def _check_data(manifest: LayerManifest, listed: bytes, path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        for at in range(0, len(listed), CHUNK_DIGEST_BYTES):
            digest = hashlib.sha256(file.read(DATA_CHUNK_BYTES)).digest()
            if digest != listed[at : at + CHUNK_DIGEST_BYTES]:
                raise damaged(manifest.digest, "its data is another's")
        if file.tell() != manifest.data_bytes:
            raise damaged(manifest.digest, "its data has another size")


def damaged(digest: str, why: str) -> Damaged:
    """The error of a layer that did not arrive as it was made."""
    return Damaged(f"layer {digest[:64]} did not arrive: {why}", cause="image")


def read_manifest(content: bytes, digest: str) -> LayerManifest:
    """Raises :class:`Damaged` for what is no manifest of ``digest``."""
    try:
        manifest = msgspec.json.decode(content, type=LayerManifest)
    except (msgspec.DecodeError, UnicodeDecodeError):
        manifest = None
    if manifest is None or manifest.digest != digest:
        raise Damaged(f"the manifest of layer {digest} is damaged in the store", cause="image")
    return manifest


def is_digest(text: str) -> bool:
    """Whether ``text`` names a layer."""
    return _DIGEST.fullmatch(text) is not None


def key(digest: str, name: str) -> str:
    """The place of one of a layer's files below the store's root.

    Raises :class:`InvalidRequest` for what is no digest or no file of a layer.
    """
    if not is_digest(digest):
        raise InvalidRequest(f"{digest!r} is not a layer digest", field="digest")
    if name not in NAMES:
        raise InvalidRequest(f"a layer has no file {name!r}", field="name")
    return f"layers/{digest}/{name}"
