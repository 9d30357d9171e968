"""Bytes that clients hand over before they are imported.

Owns: one file per upload, appended in order, its bounds, the check of its digest.
Does not own: what is in it. An upload belongs to the principal who made it and is there
until it was imported or is old; after a broken connection it goes on where it was.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from schemas.image import Blob, BlobPut
from shared.blobs.scratch import disk_errors
from shared.errors import CapacityExhausted, InvalidRequest, NotFound

READ_BYTES = 1024 * 1024
LEAST_BYTES = 4096
"""What the smallest file takes of a disk."""
SCAN_S = 1.0
"""How long what other services wrote may be unseen."""
FIELD = "upload"


@dataclass(frozen=True, slots=True)
class Uploads:
    """Uploads in ``folder``; all calls block. ``bytes_max`` bounds one, ``total_bytes_max``
    all together, ``keep_s`` how long one stays untouched."""

    folder: Path
    bytes_max: int
    total_bytes_max: int
    keep_s: float
    _room: _Room = field(default_factory=lambda: _Room())

    def put(self, owner: str, piece: BlobPut) -> int:
        """Appends a piece, unless it is there already or would leave a gap; returns how
        many bytes there are. Raises ``InvalidRequest``, ``CapacityExhausted``,
        ``Unavailable`` (disk)."""
        if piece.offset + len(piece.data) > self.bytes_max:
            raise InvalidRequest(f"an upload of over {self.bytes_max} bytes", field=FIELD)
        path = self._path(owner, piece.id)
        with disk_errors():
            self._room.take(self.folder, _growth(path, piece), self.total_bytes_max)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                return _append(fd, piece)
            finally:
                os.close(fd)

    def checked(self, owner: str, blob: Blob) -> Path:
        """Where an upload is. Raises ``NotFound``, or ``InvalidRequest`` where it is not
        what the client says that it sent; then it is gone."""
        path = self._path(owner, blob.id)
        try:
            with path.open("rb") as file, disk_errors():
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError as error:
            raise NotFound(f"there is no upload {blob.id}", field=FIELD) from error
        if (size, digest) != (blob.size_bytes, blob.sha256):
            self.drop(owner, blob.id)
            raise InvalidRequest(
                f"digest mismatch: the upload has {size} bytes with sha256 {digest}", field=FIELD
            )
        return path

    def drop(self, owner: str, id: str) -> None:
        """An upload is no longer needed."""
        self._path(owner, id).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Removes what was not touched for ``keep_s``; returns how many."""
        return swept(self.folder, self.keep_s)

    def _path(self, owner: str, id: str) -> Path:
        return self.folder / hashlib.sha256(f"{owner}/{id}".encode()).hexdigest()


@dataclass(slots=True)
class _Room:
    """What is in a folder, looked up now and then and added to in between."""

    used_bytes: int = 0
    seen_s: float = -math.inf
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, folder: Path, growth: int, total_bytes_max: int) -> None:
        if growth == 0:
            return
        with self.lock:
            if time.monotonic() - self.seen_s > SCAN_S:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.used_bytes, self.seen_s = held_bytes(folder), time.monotonic()
            if self.used_bytes + growth > total_bytes_max:
                raise CapacityExhausted(
                    f"uploads of {self.used_bytes} bytes wait to be imported", field=FIELD
                )
            self.used_bytes += growth


def held_bytes(folder: Path) -> int:
    """What the files of ``folder`` take at least."""
    used = 0
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):
            used += max(entry.stat().st_size, LEAST_BYTES)
    return used


def _growth(path: Path, piece: BlobPut) -> int:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return max(len(piece.data), LEAST_BYTES)
    end = piece.offset + len(piece.data)
    return max(end, LEAST_BYTES) - max(size, LEAST_BYTES) if size < end else 0


def _append(fd: int, piece: BlobPut) -> int:
    fcntl.flock(fd, fcntl.LOCK_EX)  # several services may share the folder
    size = os.fstat(fd).st_size
    rest = memoryview(piece.data)[max(0, size - piece.offset) :]
    if piece.offset > size:
        return size
    while rest:
        done = os.pwrite(fd, rest, size)
        rest, size = rest[done:], size + done
    return size


def swept(folder: Path, keep_s: float) -> int:
    """Removes the files of ``folder`` that are older than ``keep_s``; returns how many."""
    count, limit = 0, time.time() - keep_s
    with suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < limit:
                    if entry.is_dir():  # a crashed service's work
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)
                    count += 1
    return count
