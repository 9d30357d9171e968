"""Image archives: ``docker save`` output and OCI layouts, in a tar or a directory.

Owns: which file of an archive is which layer, digests, media types, platforms.
Does not own: tar layers, decompression. What comes out are uncompressed layer
tars, bottom first, still inside of the archive file where it is uncompressed.
"""

from __future__ import annotations

import os
import platform
import re
import tarfile
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from schemas.sandbox import ImageConfig
from services.imagesvc.imageconfig import parse_config
from services.imagesvc.spool import Spool, sha256_of
from services.imagesvc.tarlayer import FileRange, open_tar
from shared.erofs.kernelmount import open_beneath
from shared.errors import InvalidRequest, NotFound, Unsupported

FIELD = "archive"
JSON_MAX_BYTES = 16 * 1024 * 1024
LAYERS_MAX = 500  # overlay's own limit; the layers of one image are far fewer
MEMBERS_MAX = 100_000
FOREIGN_MAX = 256  # files of other names before a tar counts as no image archive
INDEX_DEPTH_MAX = 4
LINKS_MAX = 8
INDEX_TYPES = frozenset(
    {
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
    }
)
MANIFEST_TYPES = frozenset(
    {
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    }
)
LAYER_TYPES = frozenset(
    f"application/vnd.{kind}"
    for kind in (
        "oci.image.layer.v1.tar", "oci.image.layer.v1.tar+gzip", "oci.image.layer.v1.tar+zstd",
        "docker.image.rootfs.diff.tar", "docker.image.rootfs.diff.tar.gzip",
    )
)  # fmt: skip
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


_ARCHIVE_NAME = re.compile(
    r"(\./)?(manifest\.json|repositories|index\.json|oci-layout|blobs(/.*)?|[0-9a-f]{64}.*)"
)


@dataclass(frozen=True, slots=True)
class ArchiveImage:
    """``layers``: uncompressed tars, bottom first."""

    layers: list[FileRange]
    config: ImageConfig


class Members(Protocol):
    """The files of an archive by name."""

    def get(self, name: str) -> FileRange | None: ...


@dataclass(slots=True)
class TarMembers:
    """The regular files of an uncompressed tar; links between them are followed."""

    files: dict[str, FileRange]
    links: dict[str, str]

    @classmethod
    def read(cls, source: FileRange) -> TarMembers:
        """All members; fewer where the names show early that this is no image archive."""
        found = cls({}, {})
        foreign = 0
        try:
            with open_tar(source) as tar:
                for count, member in enumerate(tar):
                    foreign += _ARCHIVE_NAME.fullmatch(member.name) is None
                    if foreign > FOREIGN_MAX or count > MEMBERS_MAX:
                        break
                    found._add(member, source)
        except (tarfile.TarError, ValueError, OverflowError) as error:
            raise InvalidRequest(f"damaged tar archive: {error}", field=FIELD) from error
        return found

    def _add(self, member: tarfile.TarInfo, source: FileRange) -> None:
        name = os.path.normpath(member.name)
        if member.issym():
            self.links[name] = os.path.normpath(
                os.path.join(os.path.dirname(name), member.linkname)
            )
        elif member.islnk():
            self.links[name] = os.path.normpath(member.linkname)
        elif member.isreg() and member.sparse is None:
            start, end = member.offset_data, member.offset_data + member.size
            if end <= source.length:  # else cut off: reported as lacking if it is needed
                self.files[name] = FileRange(source.fd, source.start + start, member.size)

    def get(self, name: str) -> FileRange | None:
        name = os.path.normpath(name)
        for _ in range(LINKS_MAX):
            if name in self.files:
                return self.files[name]
            name = self.links.get(name, "")
        return None


@dataclass(slots=True)
class DirectoryMembers:
    """The files below a directory, opened beneath it without following links."""

    root_fd: int
    spool: Spool

    def get(self, name: str) -> FileRange | None:
        try:
            fd = open_beneath(self.root_fd, os.fsencode(name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return None
        return FileRange(self.spool.keep_open(fd), 0, os.fstat(fd).st_size)


def find_image(
    members: Members, spool: Spool, *, reference: str | None = None
) -> ArchiveImage | None:
    """The image in an archive, or ``None`` where the files are not an image archive.

    ``reference`` (a tag of ``docker save`` or an OCI ref name) chooses among
    several. Raises :class:`InvalidRequest` (missing or damaged parts, digest
    mismatch), :class:`NotFound` (``reference``), :class:`Unsupported` (media type).
    """
    manifest = members.get("manifest.json")
    if manifest is not None:
        entries = _saved_entries(_json_bytes(manifest))
        if entries is not None:
            return _saved_image(members, spool, _chosen(entries, reference))
    if members.get("oci-layout") is not None and members.get("index.json") is not None:
        return _oci_image(members, spool, reference)
    return None


class _SavedEntry(msgspec.Struct):
    Config: str
    Layers: list[str]
    RepoTags: list[str] | None = None


def _saved_entries(data: bytes) -> list[_SavedEntry] | None:
    """The entries of Docker's ``manifest.json``; ``None`` for any other file of that name."""
    try:
        return msgspec.json.decode(data, type=list[_SavedEntry])
    except msgspec.MsgspecError:
        return None


def _chosen(entries: list[_SavedEntry], reference: str | None) -> _SavedEntry:
    if reference is not None:
        entries = [entry for entry in entries if reference in (entry.RepoTags or [])]
        if not entries:
            raise NotFound(f"no image {reference!r} in the archive", field=FIELD)
    if len(entries) != 1:
        raise InvalidRequest(f"{len(entries)} images in one archive; name one", field=FIELD)
    return entries[0]


def _saved_image(members: Members, spool: Spool, entry: _SavedEntry) -> ArchiveImage:
    config, diff_ids = parse_config(_json_bytes(_named(members, entry.Config)))
    blobs = [_named(members, name) for name in entry.Layers]
    return ArchiveImage(_plain_layers(blobs, diff_ids, spool), config)


def _named(members: Members, name: str) -> FileRange:
    """A member that must be there; one named by its digest must also have it."""
    found = members.get(name)
    if found is None:
        raise InvalidRequest(f"the archive lacks {name!r} or is truncated", field=FIELD)
    if name.startswith("blobs/sha256/"):
        _check_digest(found, name.rpartition("/")[2], name)
    return found


def _check_digest(source: FileRange, expected: str, what: str) -> None:
    actual = sha256_of(source)
    if actual != expected:
        raise InvalidRequest(f"digest mismatch: {what} has sha256 {actual}", field=FIELD)


def _plain_layers(blobs: list[FileRange], diff_ids: list[str], spool: Spool) -> list[FileRange]:
    """The uncompressed layers, compared with the digests in the configuration."""
    if len(blobs) > LAYERS_MAX:
        raise InvalidRequest(f"{len(blobs)} layers; the limit is {LAYERS_MAX}", field=FIELD)
    if diff_ids and len(diff_ids) != len(blobs):
        raise InvalidRequest(
            f"{len(blobs)} layers but {len(diff_ids)} digests in the configuration", field=FIELD
        )
    layers = [spool.plain(blob) for blob in blobs]
    for layer, diff_id in zip(layers, diff_ids, strict=False):
        algorithm, _, expected = diff_id.partition(":")
        if algorithm != "sha256":
            raise Unsupported(f"digest algorithm {algorithm!r}", field=FIELD)
        _check_digest(layer, expected, f"layer {diff_id}")
    return layers


def _oci_image(members: Members, spool: Spool, reference: str | None) -> ArchiveImage:
    index = _decode(_json_bytes(_named(members, "index.json")))
    manifest = _manifest(members, index, reference, INDEX_DEPTH_MAX)
    config, diff_ids = parse_config(_json_bytes(_blob(members, _part(manifest, "config", dict))))
    blobs = []
    for descriptor in _part(manifest, "layers", list):
        media = descriptor.get("mediaType") if isinstance(descriptor, dict) else None
        if media not in LAYER_TYPES:
            raise Unsupported(f"layer of media type {media!r}", field=FIELD)
        blobs.append(_blob(members, descriptor))
    return ArchiveImage(_plain_layers(blobs, diff_ids, spool), config)


def _manifest(
    members: Members, index: dict[str, Any], reference: str | None, depth: int
) -> dict[str, Any]:
    """The one manifest of an index that fits ``reference`` and this machine."""
    fitting = [d for d in _part(index, "manifests", list) if _fits(d, reference)]
    if not fitting and reference is not None:
        raise NotFound(f"no image {reference!r} in the archive", field=FIELD)
    if len(fitting) != 1:
        raise InvalidRequest(f"{len(fitting)} images in one archive; name one", field=FIELD)
    media = fitting[0].get("mediaType")
    document = _decode(_json_bytes(_blob(members, fitting[0])))
    if media in INDEX_TYPES and depth > 0:
        return _manifest(members, document, None, depth - 1)
    if media not in MANIFEST_TYPES:
        raise Unsupported(f"manifest of media type {media!r}", field=FIELD)
    return document


def _fits(descriptor: Any, reference: str | None) -> bool:
    if not isinstance(descriptor, dict):
        return False
    names = descriptor.get("annotations") or {}
    known = {names.get("org.opencontainers.image.ref.name"), names.get("io.containerd.image.name")}
    if reference is not None and reference not in known:
        return False
    wanted = descriptor.get("platform") or {}
    machine = platform.machine()
    return wanted.get("os", "linux") == "linux" and wanted.get("architecture") in (
        None, machine, ARCHITECTURES.get(machine),
    )  # fmt: skip


def _blob(members: Members, descriptor: dict[str, Any]) -> FileRange:
    algorithm, _, digest = str(descriptor.get("digest")).partition(":")
    if algorithm != "sha256" or not digest.isalnum():
        raise Unsupported(f"digest {descriptor.get('digest')!r}", field=FIELD)
    return _named(members, f"blobs/sha256/{digest}")


def _json_bytes(source: FileRange) -> bytes:
    if source.length > JSON_MAX_BYTES:
        raise InvalidRequest(f"a document of {source.length} bytes", field=FIELD)
    return source.pread(source.length, 0)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"damaged image index or manifest: {error}", field=FIELD) from error


def _part(document: dict[str, Any], key: str, kind: type[Any]) -> Any:
    part = document.get(key)
    if not isinstance(part, kind):
        raise InvalidRequest(f"image manifest without {key!r}", field=FIELD)
    return part
