"""Streams brought to disk: decompressed archives and what engines send.

Owns: recognition and decompression of gzip, zstd, xz and bzip2, the size limit.
Does not own: the directory it writes to (private, swept by the store), tar.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import zstandard

from services.imagesvc.tarlayer import FileRange
from shared.errors import InvalidRequest

COPY_BYTES = 1024 * 1024
MAGIC_BYTES = 6

_OPENERS: tuple[tuple[bytes, Callable[[IO[bytes]], Iterator[bytes]]], ...] = (
    (b"\x1f\x8b", lambda raw: _pieces(gzip.GzipFile(fileobj=raw))),
    (b"\xfd7zXZ\0", lambda raw: _pieces(lzma.LZMAFile(raw))),  # noqa: SIM115
    (b"BZh", lambda raw: _pieces(bz2.BZ2File(raw))),
    (b"\x28\xb5\x2f\xfd", lambda raw: _zstd_pieces(raw)),
)
# One input piece can unpack to 32 MiB at most: a run takes 4 bytes per 128 KiB.
ZSTD_INPUT_BYTES = 1024


@dataclass(slots=True)
class Spool:
    """Files in a private ``directory``; at most ``bytes_max`` bytes in all.

    ``progress`` is told of each piece (0 bytes: spooling is not the import's
    work) and may raise to cancel. Close it to release the descriptors.
    """

    directory: Path
    bytes_max: int
    progress: Callable[[int], None]
    _used: int = 0
    _files: list[int] = field(default_factory=list)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        while self._files:
            os.close(self._files.pop())

    def keep_open(self, fd: int) -> int:
        """Have ``fd`` closed together with the spool."""
        self._files.append(fd)
        return fd

    def store(self, pieces: Iterable[bytes], *, field: str = "archive") -> FileRange:
        """Write ``pieces`` to an unnamed file."""
        flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
        fd = self.keep_open(os.open(self.directory, flags, 0o600))
        length = 0
        for piece in pieces:
            self._used += len(piece)
            if self._used > self.bytes_max:
                raise InvalidRequest(
                    f"archive unpacks to more than {self.bytes_max} bytes", field=field
                )
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(fd, rest) :]
            length += len(piece)
            self.progress(0)
        return FileRange(fd, 0, length)

    def plain(self, source: FileRange, *, field: str = "archive") -> FileRange:
        """``source`` itself where it is not compressed, else its content spooled.

        Raises :class:`InvalidRequest` where the compressed stream is cut or damaged.
        """
        head = source.pread(MAGIC_BYTES, 0)
        for magic, opener in _OPENERS:
            if head.startswith(magic):
                try:
                    return self.store(opener(_copy(source)), field=field)
                except (EOFError, lzma.LZMAError, zstandard.ZstdError, gzip.BadGzipFile) as error:
                    raise InvalidRequest(f"damaged archive: {error}", field=field) from error
                except OSError as error:
                    if error.errno is None:  # how bz2 reports bad data
                        raise InvalidRequest(f"damaged archive: {error}", field=field) from error
                    raise
        return source


def _copy(source: FileRange) -> IO[bytes]:
    """The same bytes with a position of their own."""
    return cast(IO[bytes], FileRange(source.fd, source.start, source.length))


def _pieces(stream: io.BufferedIOBase) -> Iterator[bytes]:
    while piece := stream.read(COPY_BYTES):
        yield piece


def _zstd_pieces(raw: IO[bytes]) -> Iterator[bytes]:
    """All frames of a zstd stream; unlike the library's reader this tells a cut one."""
    unpacker = zstandard.ZstdDecompressor()
    frame = unpacker.decompressobj()
    while data := raw.read(ZSTD_INPUT_BYTES):
        while data:
            if frame.eof:
                frame = unpacker.decompressobj()
            if piece := frame.decompress(data):
                yield piece
            data = frame.unused_data if frame.eof else b""
    if not frame.eof:
        raise EOFError("the zstd stream is cut")


def sha256_of(source: FileRange) -> str:
    """The digest (hex) of a byte range."""
    digest = hashlib.sha256()
    for at in range(0, source.length, COPY_BYTES):
        digest.update(source.pread(COPY_BYTES, at))
    return digest.hexdigest()
