"""Image archives: ``docker save`` output and OCI layouts, in a tar or a directory.

Owns: which file of an archive is which part of its image. Does not own: what OCI
documents mean (:mod:`services.imagesvc.ociimage`), tar layers, decompression. What comes
out are uncompressed layer tars, bottom first, still inside of the archive file where it
is uncompressed.
"""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass
from typing import Protocol

import msgspec

from services.imagesvc.imageconfig import parse_config
from services.imagesvc.ociimage import (
    LAYER_TYPES,
    OCI_INDEX,
    ArchiveImage,
    Descriptor,
    check_digest,
    check_layers,
    json_bytes,
    plain_layers,
    read_image,
)
from services.imagesvc.spool import Spool
from services.imagesvc.tarlayer import FileRange, open_tar
from shared.erofs.kernelmount import open_beneath
from shared.errors import InvalidRequest, NotFound

FIELD = "archive"
BLOBS = "blobs/sha256/"
MEMBERS_MAX = 100_000
FOREIGN_MAX = 256  # files of other names before a tar counts as no image archive
LINKS_MAX = 8
_ARCHIVE_NAME = re.compile(
    r"(\./)?(manifest\.json|repositories|index\.json|oci-layout|blobs(/.*)?|[0-9a-f]{64}.*)"
)


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
        except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
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
    several; what digests layers have is told by ``spool.confirm``. Raises
    :class:`InvalidRequest` (missing or damaged parts, digest mismatch),
    :class:`NotFound` (``reference``), :class:`Unsupported` (media type).
    """
    manifest = members.get("manifest.json")
    if manifest is not None:
        entries = _saved_entries(json_bytes(manifest, field=FIELD))
        if entries is not None:
            return _saved_image(members, spool, _chosen(entries, reference))
    if members.get("oci-layout") is not None and members.get("index.json") is not None:
        index = json_bytes(_named(members, "index.json"), field=FIELD)
        return read_image(_Layout(members, spool), spool, index, OCI_INDEX, reference=reference)
    return None


@dataclass(frozen=True, slots=True)
class _Layout:
    """The blobs of an OCI layout."""

    members: Members
    spool: Spool
    field: str = FIELD

    def blob(self, descriptor: Descriptor) -> FileRange:
        name = BLOBS + descriptor.sha256
        if descriptor.media_type in LAYER_TYPES:
            return _layer(self.members, name, self.spool)
        return _named(self.members, name)

    def begin(self, total_bytes: int) -> None:
        """They are there already."""


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
    check_layers(len(entry.Layers), field=FIELD)  # before each of them is hashed
    config, diff_ids = parse_config(json_bytes(_named(members, entry.Config), field=FIELD))
    blobs = [_layer(members, name, spool) for name in entry.Layers]
    return ArchiveImage(plain_layers(blobs, diff_ids, spool, field=FIELD), config)


def _named(members: Members, name: str) -> FileRange:
    """A member that must be there; one named by its digest must also have it."""
    found = _there(members, name)
    if name.startswith(BLOBS):
        check_digest(found, name.removeprefix(BLOBS), name, field=FIELD)
    return found


def _layer(members: Members, name: str, spool: Spool) -> FileRange:
    """As :func:`_named`; of the digest the spool tells."""
    found = _there(members, name)
    if name.startswith(BLOBS):
        spool.expect(found, name.removeprefix(BLOBS), name, field=FIELD)
    return found


def _there(members: Members, name: str) -> FileRange:
    found = members.get(name)
    if found is None:
        raise InvalidRequest(f"the archive lacks {name!r} or is truncated", field=FIELD)
    return found
