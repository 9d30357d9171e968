"""One layer from a tar stream that lies uncompressed in a file.

Owns: headers (ustar, GNU, PAX), sparse maps, xattrs, nanosecond times, whiteout
names, detection of truncation. Does not own: decompression and which tar is a
layer of what (:mod:`services.imagesvc.archive`). The contents are not read here:
inodes keep byte ranges of the file, so a layer is imported without being unpacked
and its data is read once.
"""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from typing import IO

from services.imagesvc.tarheaders import BoundedTar
from shared.erofs.layertree import Extent, Inode, LayerTree
from shared.errors import InvalidRequest, Unsupported

BLOCK_BYTES = 512
AHEAD_BYTES = 4096
"""Read at a time where headers are: those of small files lie close together."""
XATTR_KEYWORD = "SCHILY.xattr."
SPARSE_NAME_KEYWORD = "GNU.sparse.name"
ACL_KEYWORD = "SCHILY.acl."
XATTRS_MAX_BYTES = 256 * 1024**2
"""Of all xattrs of one layer: they are held in memory."""
TAR_TYPES = {
    tarfile.DIRTYPE: stat.S_IFDIR,
    tarfile.SYMTYPE: stat.S_IFLNK,
    tarfile.CHRTYPE: stat.S_IFCHR,
    tarfile.BLKTYPE: stat.S_IFBLK,
    tarfile.FIFOTYPE: stat.S_IFIFO,
}


@dataclass(slots=True)
class FileRange:
    """A byte range of an open file as a source; also the file object ``tarfile`` reads."""

    fd: int
    start: int
    length: int
    position: int = 0
    _ahead: bytes = field(default=b"", compare=False)  # the last small piece, and more
    _ahead_at: int = field(default=0, compare=False)

    def pread(self, length: int, offset: int) -> bytes:
        return os.pread(self.fd, min(length, max(0, self.length - offset)), self.start + offset)

    def confirm(self) -> None:
        """What tar said of the file was checked already; its digest is taken from the data."""

    def close(self) -> None:
        """The descriptor belongs to the spool."""

    def read(self, length: int = -1) -> bytes:
        wanted = self.length - self.position if length < 0 else length
        if wanted > BLOCK_BYTES:
            data = self.pread(wanted, self.position)
        else:
            at = self.position - self._ahead_at
            if not 0 <= at <= len(self._ahead) - wanted:
                self._ahead, self._ahead_at = self.pread(AHEAD_BYTES, self.position), self.position
                at = 0
            data = self._ahead[at : at + wanted]
        self.position += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position


def read_tar(
    source: FileRange, *, lower: Inode | None = None, entries_max: int, field: str = "archive"
) -> LayerTree:
    """The layer in the uncompressed tar that ``source`` holds.

    ``lower`` is the merged view of the layers below it. Raises
    :class:`InvalidRequest` (truncated or damaged archive, ``..`` or absolute
    names, a hard link without target, more than ``entries_max`` entries) and
    :class:`Unsupported` (what no layer can express), each naming the entry.
    """
    tree = LayerTree(lower=lower, field=field)
    count = xattr_bytes = 0
    try:
        with open_tar(source) as tar:
            for count, member in enumerate(members(tar), start=1):
                if count > entries_max:
                    raise InvalidRequest(f"more than {entries_max} entries", field=field)
                xattr_bytes += _xattr_bytes(member)
                if xattr_bytes > XATTRS_MAX_BYTES:
                    raise Unsupported(f"over {XATTRS_MAX_BYTES} bytes of xattrs", field=field)
                _add(tree, member, source, field)
            end = tar.offset
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequest(f"damaged tar archive: {error}", field=field) from error
    # tarfile ends quietly at a cut or damaged header; only the end mark tells.
    if source.pread(BLOCK_BYTES, end) != bytes(BLOCK_BYTES):
        raise InvalidRequest(
            f"truncated or damaged tar archive: no end mark after {count} entries", field=field
        )
    return tree


def open_tar(source: FileRange) -> tarfile.TarFile:
    source.seek(0)
    file: IO[bytes] = source  # type: ignore[assignment]  # read, seek and tell are all it uses
    return BoundedTar.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape")


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The entries of a tar; unlike its own iterator this keeps none of them."""
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # typeshed has no type for it
        yield member


def _add(tree: LayerTree, member: tarfile.TarInfo, source: FileRange, field: str) -> None:
    # tarfile lets a long name's record override it where that comes later
    path = _bytes(member.pax_headers.get(SPARSE_NAME_KEYWORD, member.name))
    if member.islnk():
        tree.link(path, _bytes(member.linkname))
    else:
        tree.add_oci(path, _inode(member, source, field))


def _inode(member: tarfile.TarInfo, source: FileRange, field: str) -> Inode:
    kind = stat.S_IFREG if member.isreg() else TAR_TYPES.get(member.type)
    if kind is None:
        raise Unsupported(f"{member.name!r}: tar entry of type {member.type!r}", field=field)
    inode = Inode(
        kind | stat.S_IMODE(member.mode),
        uid=member.uid,
        gid=member.gid,
        mtime_ns=_mtime_ns(member),
        xattrs=_xattrs(member, field),
    )
    if member.isreg():
        inode.size, inode.source = member.size, source
        inode.extents = _extents(member, source, field)
    elif member.issym():
        inode.target, inode.mode = _bytes(member.linkname), stat.S_IFLNK | 0o777
    elif member.ischr() or member.isblk():
        inode.rdev = os.makedev(member.devmajor, member.devminor)
    return inode


def _extents(member: tarfile.TarInfo, source: FileRange, field: str) -> tuple[Extent, ...]:
    """Where a regular file's bytes are; checked to lie within the archive."""
    # typeshed has no type for it: (offset, length) pairs of a GNU sparse file
    sparse: list[tuple[int, int]] | None = member.sparse  # type: ignore[assignment]
    spans = sparse if sparse is not None else [(0, member.size)]
    extents, at, end = [], member.offset_data, 0
    for offset, length in spans:
        if length == 0:  # old GNU maps are filled up with such
            continue
        if length < 0 or offset < end or offset + length > member.size:
            raise InvalidRequest(f"{member.name!r}: impossible sparse map", field=field)
        extents.append(Extent(offset, length, at))
        at, end = at + length, offset + length
    if at > source.length:
        raise InvalidRequest(f"truncated tar archive: {member.name!r} is cut off", field=field)
    return tuple(extents)


def _xattr_bytes(member: tarfile.TarInfo) -> int:
    """Their size, before a copy of them is made for each entry that a global header meets."""
    return sum(
        len(keyword) + len(value)
        for keyword, value in member.pax_headers.items()
        if keyword.startswith(XATTR_KEYWORD)
    )


def _xattrs(member: tarfile.TarInfo, field: str) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    for keyword, value in member.pax_headers.items():
        if keyword.startswith(XATTR_KEYWORD):
            found[_bytes(keyword[len(XATTR_KEYWORD) :])] = _bytes(value)
        elif keyword.startswith(ACL_KEYWORD):
            raise Unsupported(f"{member.name!r}: textual ACL ({keyword})", field=field)
    return found


def _mtime_ns(member: tarfile.TarInfo) -> int:
    """Nanoseconds; from the PAX text, as a float would lose the last digits."""
    text = member.pax_headers.get("mtime")
    try:
        return int((Decimal(text) if text else Decimal(member.mtime)) * 1_000_000_000)
    except (InvalidOperation, ValueError):
        return int(member.mtime) * 1_000_000_000


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
