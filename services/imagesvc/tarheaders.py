"""Extended headers of foreign tars, within bounds.

Owns: how large long names, PAX records and sparse maps may be, and that they are well formed
before ``tarfile`` reads them: its own search takes time quadratic in what a client chose; a
short way for the headers that nearly all entries have. Does not own: what headers mean
(``tarlayer``).
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any, Self

from shared.errors import InvalidRequest, Unsupported

HEADER_MAX_BYTES = 128 * 1024
"""Of one header, and of all global ones: the longest xattr there is and as much besides."""
HEADERS_MAX_BYTES = 512 * 1024**2
"""Of all headers of one tar: they are held in memory."""
DIGITS_MAX = 255
"""In a row, in a PAX header: a file's name may have as many."""
SPANS_MAX = 1_000_000
"""Of one sparse file."""
FIELD = "archive"
_BLOCK_BYTES = 512
_NUMBER_MAX = 20  # digits of 64 bits
_PAX_TYPES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_NAME_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_DIGITS = re.compile(rb"[0-9]{%d}" % (DIGITS_MAX + 1))
_NUMBERS = re.compile(
    rb"([0-7]{7})\0([0-7]{7})\0([0-7]{7})\0([0-7]{11})\0([0-7]{11})\0([0-7]{6})\0 ([0125])"
)
"""Mode, owners, size, time, checksum and type, as the common tars write them."""
_NO_DEVICE = (bytes(16), b"0000000\0" * 2)


class _Header(tarfile.TarInfo):
    """A header that is looked at before it is read."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """As the inherited one, to which all but plain headers of files, links and
        directories are left; names of owners are not read."""
        found = _NUMBERS.match(buf, 100) if len(buf) == _BLOCK_BYTES else None
        if found is None or buf[329:345] not in _NO_DEVICE:
            return super().frombuf(buf, encoding, errors)
        mode, uid, gid, size, mtime, checksum = (int(one, 8) for one in found.groups()[:6])
        if sum(buf) - sum(buf[148:156]) + 8 * ord(" ") != checksum:
            return super().frombuf(buf, encoding, errors)
        header = cls(buf[:100].partition(b"\0")[0].decode(encoding, errors))
        header.mode, header.uid, header.gid, header.size = mode, uid, gid, size
        header.mtime, header.chksum, header.type = mtime, checksum, found[7]
        header.linkname = buf[157:257].partition(b"\0")[0].decode(encoding, errors)
        if header.type == tarfile.DIRTYPE:
            header.name = header.name.rstrip("/")
        if buf[345]:
            prefix = buf[345:500].partition(b"\0")[0].decode(encoding, errors)
            header.name = prefix + "/" + header.name
        return header

    def _proc_member(self, tar: BoundedTar) -> tarfile.TarInfo:
        if self.type in _PAX_TYPES + _NAME_TYPES:
            tar.count(self.size, everywhere=self.type == tarfile.XGLTYPE)
        if self.type in _PAX_TYPES:
            at = tar.fileobj.tell()
            _check_records(tar.fileobj.read(self.size))
            tar.fileobj.seek(at)
        found: tarfile.TarInfo = super()._proc_member(tar)  # type: ignore[misc]
        return found

    def _proc_gnusparse_10(self, next: Any, pax_headers: object, tar: BoundedTar) -> None:
        numbers = _sparse_map(tar.fileobj)
        next.offset_data = tar.fileobj.tell()
        next.sparse = list(zip(numbers[::2], numbers[1::2], strict=True))


class BoundedTar(tarfile.TarFile):
    """A tar to read whose headers are bounded: :class:`Unsupported` over a limit,
    :class:`InvalidRequest` where they are damaged."""

    tarinfo = _Header
    fileobj: IO[bytes]
    header_bytes = global_bytes = 0

    def count(self, size: int, *, everywhere: bool) -> None:
        """Another header; ``everywhere``: one that each entry after it repeats."""
        self.header_bytes += size
        self.global_bytes += size if everywhere else 0
        if max(size, self.global_bytes) > HEADER_MAX_BYTES:
            raise Unsupported(f"a tar header of over {HEADER_MAX_BYTES} bytes", field=FIELD)
        if self.header_bytes > HEADERS_MAX_BYTES:
            raise Unsupported(f"tar headers of over {HEADERS_MAX_BYTES} bytes", field=FIELD)


def _check_records(header: bytes) -> None:
    """PAX records follow each other without a gap: ``length keyword=value\\n``."""
    if _DIGITS.search(header):
        raise Unsupported(f"over {DIGITS_MAX} digits in a row in a PAX header", field=FIELD)
    at = 0
    while at < len(header):
        space = header.find(b" ", at, at + _NUMBER_MAX)
        digits = header[at : max(at, space)]
        end = at + (int(digits) if digits.isdigit() else 0)
        if not space + 1 < header.find(b"=", at, end) or header[end - 1 : end] != b"\n":
            raise InvalidRequest("damaged tar archive: a PAX header", field=FIELD)
        at = end


def _sparse_map(file: IO[bytes]) -> list[int]:
    """Offsets and lengths, in turn, at the head of a sparse file's data."""
    lines = _lines(file)
    spans = int(next(lines))
    if spans > SPANS_MAX:
        raise Unsupported(f"a sparse file of over {SPANS_MAX} spans", field=FIELD)
    return [int(next(lines)) for _ in range(2 * spans)]


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Short lines without end; reads no block more than those wanted need."""
    rest = b""
    while block := file.read(_BLOCK_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        yield from lines
        if len(rest) > _NUMBER_MAX:
            break
    raise InvalidRequest("damaged tar archive: a sparse map", field=FIELD)
