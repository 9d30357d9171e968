"""OCI images: from an index or manifest to layers, wherever their blobs come from.

Owns: media types, the choice of a platform, sizes and digests, order of layers. Does not
own: how a blob is got (an archive, a registry), decompression, tar layers.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from schemas.sandbox import ImageConfig
from services.imagesvc.imageconfig import parse_config
from services.imagesvc.spool import Spool, compare_digest, sha256_of
from services.imagesvc.tarlayer import FileRange
from shared.errors import InvalidRequest, NotFound, Unsupported

JSON_MAX_BYTES = 16 * 1024 * 1024
LAYERS_MAX = 500  # overlay's own limit; the layers of one image are far fewer
INDEX_DEPTH_MAX = 4
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
INDEX_TYPES = frozenset({OCI_INDEX, "application/vnd.docker.distribution.manifest.list.v2+json"})
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MANIFEST_TYPES = frozenset({OCI_MANIFEST, "application/vnd.docker.distribution.manifest.v2+json"})
LAYER_TYPES = frozenset(
    f"application/vnd.{kind}"
    for kind in (
        "oci.image.layer.v1.tar", "oci.image.layer.v1.tar+gzip", "oci.image.layer.v1.tar+zstd",
        "docker.image.rootfs.diff.tar", "docker.image.rootfs.diff.tar.gzip",
    )
)  # fmt: skip
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
REF_NAMES = ("org.opencontainers.image.ref.name", "io.containerd.image.name")


@dataclass(frozen=True, slots=True)
class ArchiveImage:
    """``layers``: uncompressed tars, bottom first."""

    layers: list[FileRange]
    config: ImageConfig


@dataclass(frozen=True, slots=True)
class Descriptor:
    """What a document says about a blob; ``size`` in bytes, ``None`` where it does not."""

    media_type: str | None
    digest: str
    size: int | None = None

    @property
    def sha256(self) -> str:
        return self.digest.partition(":")[2]


class BlobSource(Protocol):
    """Where the blobs of an image come from. ``field``: of the request, for errors."""

    @property
    def field(self) -> str: ...

    def blob(self, descriptor: Descriptor) -> FileRange:
        """A blob whose digest was checked; that of a layer may yet be told by the spool."""
        ...

    def begin(self, total_bytes: int) -> None:
        """So many bytes of layers will be asked for next."""
        ...


def read_image(
    blobs: BlobSource, spool: Spool, document: bytes, media_type: str | None, *,
    reference: str | None = None,
) -> ArchiveImage:  # fmt: skip
    """The image of an index or manifest.

    ``reference`` (an OCI ref name) chooses among several of an index; what digests layers
    have is told by ``spool.confirm``. Raises :class:`InvalidRequest` (missing or damaged
    parts, digest mismatch),
    :class:`NotFound` (``reference``), :class:`Unsupported` (media type).
    """
    manifest = _manifest(blobs, _decode(document, blobs.field), media_type, reference)
    named = _part(manifest, "config", dict, blobs.field)
    parsed = parse_config(
        json_bytes(blobs.blob(_descriptor(named, blobs.field)), field=blobs.field),
        field=blobs.field,
    )
    layers = [
        _descriptor(one, blobs.field) for one in _part(manifest, "layers", list, blobs.field)
    ]
    for layer in layers:
        if layer.media_type not in LAYER_TYPES:
            raise Unsupported(f"layer of media type {layer.media_type!r}", field=blobs.field)
    check_layers(len(layers), field=blobs.field)
    blobs.begin(sum(layer.size or 0 for layer in layers))
    found = [blobs.blob(layer) for layer in layers]
    return ArchiveImage(plain_layers(found, parsed[1], spool, field=blobs.field), parsed[0])


def _manifest(
    blobs: BlobSource, document: dict[str, Any], media_type: str | None, reference: str | None
) -> dict[str, Any]:
    """The one manifest below an index that fits ``reference`` and this machine."""
    for _ in range(INDEX_DEPTH_MAX):
        if media_type in MANIFEST_TYPES:
            return document
        if media_type not in INDEX_TYPES:
            raise Unsupported(f"manifest of media type {media_type!r}", field=blobs.field)
        chosen = _chosen(_part(document, "manifests", list, blobs.field), reference, blobs.field)
        media_type, reference = chosen.media_type, None
        document = _decode(json_bytes(blobs.blob(chosen), field=blobs.field), blobs.field)
    if media_type in MANIFEST_TYPES:
        return document
    raise InvalidRequest(f"more than {INDEX_DEPTH_MAX} indexes in each other", field=blobs.field)


def _chosen(entries: list[Any], reference: str | None, field: str) -> Descriptor:
    named = [one for one in entries if isinstance(one, dict) and _is_named(one, reference)]
    if not named and reference is not None:
        raise NotFound(f"no image {reference!r} in the {field}", field=field)
    fitting = [one for one in named if _fits(one)]
    if named and not fitting:
        there = ", ".join(sorted({_platform(one) for one in named}))
        raise Unsupported(f"no image for {_machine()}; there are {there}", field=field)
    # variants of a machine's architecture are for newer models of it
    plain = [one for one in fitting if not (one.get("platform") or {}).get("variant")]
    if len(plain or fitting) != 1:
        raise InvalidRequest(
            f"{len(plain or fitting)} images in one {field}; name one", field=field
        )
    return _descriptor((plain or fitting)[0], field)


def _is_named(entry: dict[str, Any], reference: str | None) -> bool:
    annotations = entry.get("annotations") or {}
    return reference is None or reference in [annotations.get(name) for name in REF_NAMES]


def _fits(entry: dict[str, Any]) -> bool:
    wanted = entry.get("platform") or {}
    machine = platform.machine()
    return wanted.get("os", "linux") == "linux" and wanted.get("architecture") in (
        None, machine, ARCHITECTURES.get(machine),
    )  # fmt: skip


def _platform(entry: dict[str, Any]) -> str:
    wanted = entry.get("platform") or {}
    return f"{wanted.get('os', '?')}/{wanted.get('architecture', '?')}"


def _machine() -> str:
    machine = platform.machine()
    return f"linux/{ARCHITECTURES.get(machine, machine)}"


def _descriptor(entry: Any, field: str) -> Descriptor:
    if not isinstance(entry, dict):
        raise InvalidRequest("image manifest with a blob that is no object", field=field)
    digest, size = str(entry.get("digest")), entry.get("size")
    algorithm, _, value = digest.partition(":")
    if algorithm != "sha256" or len(value) != 64 or not value.isalnum():
        raise Unsupported(f"digest {digest!r}", field=field)
    if size is not None and (not isinstance(size, int) or size < 0):
        raise InvalidRequest(f"blob {digest} of size {size!r}", field=field)
    return Descriptor(entry.get("mediaType"), digest, size)


def plain_layers(
    blobs: list[FileRange], diff_ids: list[str], spool: Spool, *, field: str
) -> list[FileRange]:
    """The uncompressed layers. They are compared with the digests in the configuration beside
    what is done next: ``spool.confirm`` tells."""
    if diff_ids and len(diff_ids) != len(blobs):
        raise InvalidRequest(
            f"{len(blobs)} layers but {len(diff_ids)} digests in the configuration", field=field
        )
    layers = [spool.plain(blob, field=field) for blob in blobs]
    for layer, diff_id in zip(layers, diff_ids, strict=False):
        algorithm, _, expected = diff_id.partition(":")
        if algorithm != "sha256":
            raise Unsupported(f"digest algorithm {algorithm!r}", field=field)
        spool.expect(layer, expected, f"layer {diff_id}", field=field)
    return layers


def check_layers(count: int, *, field: str) -> None:
    """Raises :class:`InvalidRequest` for an image of too many layers."""
    if count > LAYERS_MAX:
        raise InvalidRequest(f"{count} layers; the limit is {LAYERS_MAX}", field=field)


def check_digest(source: FileRange, expected: str, what: str, *, field: str) -> None:
    """Raises :class:`InvalidRequest` where ``source`` has another SHA-256."""
    compare_digest(sha256_of(source), expected, what, field=field)


def json_bytes(source: FileRange, *, field: str) -> bytes:
    """A whole document, of bounded size."""
    if source.length > JSON_MAX_BYTES:
        raise InvalidRequest(f"a document of {source.length} bytes", field=field)
    return source.pread(source.length, 0)


def _decode(data: bytes, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"damaged image index or manifest: {error}", field=field) from error


def _part(document: dict[str, Any], key: str, kind: type[Any], field: str) -> Any:
    part = document.get(key)
    if not isinstance(part, kind):
        raise InvalidRequest(f"image manifest without {key!r}", field=field)
    return part
