"""Streams brought to disk: decompressed archives and what engines send.

Owns: recognition and decompression of gzip, zstd, xz and bzip2, the size limit, digests of
what lies on disk, taken beside what else is done with it. Does not own: the directory it
writes to (private, swept by the store), tar.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import lzma
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

import zstandard

from services.imagesvc.tarlayer import FileRange
from shared.errors import InvalidRequest

COPY_BYTES = 1024 * 1024
HASH_BYTES = 8 * 1024 * 1024
"""The larger, the less whoever takes a digest comes in the way of the interpreter's others."""
MAGIC_BYTES = 6
WAIT_S = 0.5
"""Between two looks, while a digest is waited for, at whether the import is to go on."""

_OPENERS: tuple[tuple[bytes, Callable[[IO[bytes]], Iterator[bytes]]], ...] = (
    (b"\x1f\x8b", lambda raw: _pieces(gzip.GzipFile(fileobj=raw))),
    (b"\xfd7zXZ\0", lambda raw: _pieces(lzma.LZMAFile(raw))),  # noqa: SIM115
    (b"BZh", lambda raw: _pieces(bz2.BZ2File(raw))),
    (b"\x28\xb5\x2f\xfd", lambda raw: _zstd_pieces(raw)),
)
# One input piece can unpack to 32 MiB at most: a run takes 4 bytes per 128 KiB.
ZSTD_INPUT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class _Expected:
    """A digest that is being taken, and what it should be."""

    found: Future[str]
    sha256: str
    what: str
    field: str


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
    _hashing: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="digest")
    )
    _hashed: dict[tuple[int, int, int], Future[str]] = field(default_factory=dict)
    _expected: list[_Expected] = field(default_factory=list)
    _closed: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._hashing.shutdown(cancel_futures=True)  # it reads the files
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

    def expect(self, source: FileRange, sha256: str, what: str, *, field: str) -> None:
        """Have a digest (hex) compared beside what is done next; :meth:`confirm` tells."""
        place = (source.fd, source.start, source.length)
        found = self._hashed.get(place)
        if found is None:
            found = self._hashing.submit(sha256_of, source, self._closed.is_set)
            self._hashed[place] = found
        self._expected.append(_Expected(found, sha256, what, field))

    def confirm(self) -> None:
        """Raises :class:`InvalidRequest` where an expected digest is another one."""
        while self._expected:
            one = self._expected[0]
            while not wait([one.found], WAIT_S).done:
                self.progress(0)
            compare_digest(one.found.result(), one.sha256, one.what, field=one.field)
            del self._expected[0]

    def plain(self, source: FileRange, *, field: str = "archive") -> FileRange:
        """``source`` itself where it is not compressed, else its content spooled.

        Raises :class:`InvalidRequest` where the compressed stream is cut or damaged, or an
        expected digest is another one: nothing is unpacked before.
        """
        head = source.pread(MAGIC_BYTES, 0)
        for magic, opener in _OPENERS:
            if head.startswith(magic):
                self.confirm()
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


def sha256_of(source: FileRange, stopped: Callable[[], bool] = lambda: False) -> str:
    """The digest (hex) of a byte range; of less, for nobody, once ``stopped`` says so."""
    digest = hashlib.sha256()
    view = memoryview(bytearray(min(HASH_BYTES, source.length)))
    at = 0
    while at < source.length and not stopped():
        place = view[: source.length - at]
        length = os.preadv(source.fd, [place], source.start + at)
        if not length:
            break  # cut meanwhile: what there was has another digest
        digest.update(place[:length])
        at += length
    return digest.hexdigest()


def compare_digest(actual: str, expected: str, what: str, *, field: str) -> None:
    """Raises :class:`InvalidRequest` where a SHA-256 is another one."""
    if actual != expected:
        raise InvalidRequest(f"digest mismatch: {what} has sha256 {actual}", field=field)
