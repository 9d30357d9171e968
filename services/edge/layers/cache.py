"""Layers' files on this node's disk: least recently used first out, under a cap.

Owns: ``<root>/<digest>/{manifest.json,meta.erofs,chunks.sha256,profile}`` and
``<root>/<digest>/<chunk>`` files, their sizes and order. Does not own: what is right
(:mod:`.chunks` verifies before it puts; what an earlier process left counts as unverified
until it is checked again, so no write needs to be atomic), fetching.

A layer in use loses chunks only when nothing else is left to go, and never its metadata; the
metadata of another goes after its last chunk.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.blobs.base import Content
from shared.blobs.layout import CHUNKS_NAME, MANIFEST_NAME, META_NAME, is_digest

META = -1
"""The entry of a layer's metadata, manifest and chunk digests."""
FDS_MAX = 256
FREE_LOOK_S = 0.5
Key = tuple[str, int]


@dataclass(slots=True)
class _Entry:
    size: int
    verified: bool
    stamp: int = 0
    """Grows with each use."""


class LayerCache:
    """Not thread-safe but for :meth:`write` and :meth:`content`, which only touch files."""

    def __init__(
        self, root: Path, *, cap_bytes: int, reserve_bytes: int, in_use: Callable[[str], bool]
    ) -> None:
        self.root = root
        self._cap, self._reserve, self._in_use = cap_bytes, reserve_bytes, in_use
        self._layers: dict[str, OrderedDict[int, _Entry]] = {}
        self._stamp = 0
        self._fds: OrderedDict[Key, int] = OrderedDict()
        self.bytes = 0
        self.evicted = 0
        self._free = (0.0, 0)
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _, key, size in sorted(self._found()):
            self._add(key, size, verified=False)

    def _found(self) -> Iterator[tuple[float, Key, int]]:
        """What an earlier process left, by age; layers without metadata are removed."""
        for folder in list(self.root.iterdir()):
            if not is_digest(folder.name) or not (folder / MANIFEST_NAME).exists():
                shutil.rmtree(folder, ignore_errors=True)
                continue
            files = [path for path in folder.iterdir() if path.name.isdigit()]
            for path in files:
                status = path.stat()
                yield status.st_mtime, (folder.name, int(path.name)), status.st_size
            yield folder.stat().st_mtime, (folder.name, META), self._meta_bytes(folder)

    def _meta_bytes(self, folder: Path) -> int:
        names = (META_NAME, CHUNKS_NAME, MANIFEST_NAME)
        return sum((folder / n).stat().st_size for n in names if (folder / n).exists())

    def folder(self, digest: str) -> Path:
        return self.root / digest

    def layers(self) -> list[str]:
        """Digests of layers whose metadata is here."""
        return [digest for digest in self._layers if self.has((digest, META))]

    def has(self, key: Key) -> bool:
        return self._entry(key) is not None

    def _entry(self, key: Key) -> _Entry | None:
        entries = self._layers.get(key[0])
        return entries.get(key[1]) if entries else None

    def _used(self, key: Key) -> None:
        entries = self._layers[key[0]]
        self._stamp += 1
        entries[key[1]].stamp = self._stamp
        entries.move_to_end(key[1])

    def add_layer(self, digest: str) -> None:
        """Its folder was put in place."""
        self._add((digest, META), self._meta_bytes(self.folder(digest)))

    def touch(self, digest: str) -> None:
        """The layer is wanted now."""
        if self.has((digest, META)):
            self._used((digest, META))

    def read(self, key: Key, start: int, length: int) -> bytearray | None:
        """A part of a verified chunk if it needs no wait for the disk."""
        entry = self._entry(key)
        if entry is None or not entry.verified:
            return None
        try:
            data = bytearray(length)
            count = os.preadv(self._fd(key), [data], start, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                self.discard(key)
            return None
        self._used(key)
        return data if count == length else None

    def content(self, key: Key) -> bytes | None:
        """A whole chunk, to be verified; may wait for the disk. For any thread."""
        try:
            return self._path(key).read_bytes()
        except OSError:
            return None

    def verified(self, key: Key) -> None:
        """The chunk's file is as it should be."""
        entry = self._entry(key)
        if entry is not None:
            entry.verified = True
            self._used(key)

    def write(self, key: Key, data: Content) -> bool:
        """The chunk's file; ``False`` where the disk refuses. For any thread."""
        path = self._path(key)
        try:
            path.write_bytes(data)
            return True
        except OSError:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return False

    def put(self, key: Key, size: int) -> None:
        """The file that was written belongs to the cache."""
        self._add(key, size)

    def _add(self, key: Key, size: int, *, verified: bool = True) -> None:
        self._drop_entry(key)
        self._layers.setdefault(key[0], OrderedDict())[key[1]] = _Entry(size, verified)
        self._used(key)
        self.bytes += size
        self.make_room(0)

    def make_room(self, size: int) -> bool:
        """Evicts until ``size`` more bytes fit; ``False`` where the disk has no room."""
        while self.bytes + size > self._cap and self._evict():
            pass
        if size and self._disk_free() < size + self._reserve:
            self._free = (0.0, 0)
            return self._evict() and self._disk_free() >= size
        return self.bytes + size <= self._cap

    def _disk_free(self) -> int:
        at, free = self._free
        now = time.monotonic()
        if now - at > FREE_LOOK_S:
            status = os.statvfs(self.root)
            free = status.f_bavail * status.f_frsize
            self._free = (now, free)
        return free

    def _evict(self) -> bool:
        """Removes the oldest chunk of layers that are not in use, else of those that are."""
        oldest: tuple[bool, int, Key] | None = None
        for digest, entries in self._layers.items():
            in_use = self._in_use(digest)
            index = next((index for index in entries if index != META), META)
            if index != META or not in_use:
                oldest = min(
                    oldest or (True, self._stamp + 1, ("", META)),
                    (in_use, entries[index].stamp, (digest, index)),
                )
        if oldest is None:
            return False
        key = oldest[2]
        self.forget(key[0]) if key[1] == META else self.discard(key)
        self.evicted += 1
        return True

    def discard(self, key: Key) -> None:
        """Removes one chunk."""
        self._drop_entry(key)
        self._path(key).unlink(missing_ok=True)

    def forget(self, digest: str) -> None:
        """Removes a layer with all its chunks."""
        for index in list(self._layers.get(digest, ())):
            self._drop_entry((digest, index))
        shutil.rmtree(self.folder(digest), ignore_errors=True)

    def _drop_entry(self, key: Key) -> None:
        entry = self._entry(key)
        if entry is not None:
            self.bytes -= entry.size
            del self._layers[key[0]][key[1]]
            if not self._layers[key[0]]:
                del self._layers[key[0]]
        fd = self._fds.pop(key, None)
        if fd is not None:
            os.close(fd)

    def _fd(self, key: Key) -> int:
        fd = self._fds.get(key)
        if fd is None:
            fd = self._fds[key] = os.open(self._path(key), os.O_RDONLY | os.O_CLOEXEC)
            if len(self._fds) > FDS_MAX:
                os.close(self._fds.popitem(last=False)[1])
        else:
            self._fds.move_to_end(key)
        return fd

    def _path(self, key: Key) -> Path:
        return self.root / key[0] / str(key[1])
