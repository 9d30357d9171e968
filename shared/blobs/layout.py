"""What a layer consists of in every store. Pure.

A layer is a folder ``layers/<digest>/`` of::

    meta.erofs      metadata image; its SHA-256 is the digest
    data.blob       contents (absent where all are in the metadata)
    chunks.sha256   32 bytes per 256 KiB of data.blob
    manifest.json   :class:`LayerManifest`; written last where a folder can't be renamed

The metadata image names the blob by the SHA-256 of ``chunks.sha256`` (its device tag), so
that one digest covers everything.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from shared.errors import Internal, InvalidRequest

META_NAME, DATA_NAME, CHUNKS_NAME = "meta.erofs", "data.blob", "chunks.sha256"
MANIFEST_NAME = "manifest.json"
NAMES = (META_NAME, DATA_NAME, CHUNKS_NAME, MANIFEST_NAME)
MANIFEST_VERSION = 1
DATA_CHUNK_BYTES = 256 * 1024
CHUNK_DIGEST_BYTES = 32
MANIFEST_BYTES_MAX = 64 * 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Damaged(Internal):
    """A store holds something else than was put."""


class LayerManifest(msgspec.Struct, frozen=True):
    """What a node must know to fetch, check and mount a layer. Sizes in bytes."""

    digest: str
    meta_bytes: int
    data_bytes: int
    data_digest: str
    entries: int
    data_chunk_bytes: int = DATA_CHUNK_BYTES
    version: int = MANIFEST_VERSION

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
        )


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
