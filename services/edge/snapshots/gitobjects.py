"""Git's objects, read from bytes: loose ones, packs, the index; and packs written. Pure.

Owns: the formats (SHA-1). Does not own: which objects there are or are needed
(:mod:`services.edge.snapshots.scrubgit`). Everything read here was written by a sandbox: sizes are
bounded, what is malformed raises one of :data:`MALFORMED`, and what would cost more than a
scrub has raises :class:`TooMuch`.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

MALFORMED = (ValueError, KeyError, IndexError, struct.error, zlib.error)
OBJECT_BYTES_MAX = 128 * 1024 * 1024
"""Of one object; and of the deltas that lead to one."""
OBJECTS_MAX = 2_000_000
"""Of one pack."""
PIECE_BYTES = 64 * 1024
DELTA_COST = 16
"""Bytes that are copied in about the time that a byte of a delta takes."""
DELTA_DEPTH_MAX = 4096
ID_BYTES = 20
_KINDS = {1: b"commit", 2: b"tree", 3: b"blob", 4: b"tag"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_OFS_DELTA, _REF_DELTA = 6, 7
_GITLINK, _TREE = b"160000", b"40000"
_IDX_MAGIC, _PACK_MAGIC, _INDEX_MAGIC = b"\xfftOc\0\0\0\x02", b"PACK", b"DIRC"
_FANOUT_BYTES = 256 * 4
_IDX_HEADER_BYTES = 8 + _FANOUT_BYTES
_LARGE_OFFSET = 0x80000000


class TooMuch(Exception):
    """What a scrub may use is used up; says of what."""


@dataclass(slots=True)
class Budget:
    """What one scrub may still use: bytes unpacked, and bytes of packs that are held in
    memory until the layer is written. ``tick`` is called for every object and may raise."""

    unpacked_bytes: int = 16 << 30
    held_bytes: int = 512 << 20
    tick: Callable[[int], None] = lambda _done: None

    def unpack(self, count: int) -> None:
        """Raises ``TooMuch``."""
        self.tick(0)
        self.unpacked_bytes -= count
        if self.unpacked_bytes < 0:
            raise TooMuch("git objects to unpack")

    def hold(self, count: int) -> None:
        """Raises ``TooMuch``."""
        self.held_bytes -= count
        if self.held_bytes < 0:
            raise TooMuch("git objects that stay")


@dataclass(frozen=True, slots=True)
class Object:
    """One object: ``kind`` is commit, tree, blob or tag."""

    kind: bytes
    content: bytes

    @property
    def id(self) -> bytes:
        sha1 = hashlib.sha1(b"%s %d\0" % (self.kind, len(self.content)), usedforsecurity=False)
        sha1.update(self.content)
        return sha1.digest()

    def needs(self) -> Iterator[tuple[bytes, bool]]:
        """The ids it names, and whether those are blobs, which name nothing."""
        if self.kind == b"tree":
            yield from _entries(self.content)
        elif self.kind in (b"commit", b"tag"):
            for line in self.content.split(b"\n\n", 1)[0].split(b"\n"):
                word, _, value = line.partition(b" ")
                if word in (b"tree", b"parent", b"object"):
                    yield bytes.fromhex(value.decode("ascii")), False


def _entries(tree: bytes) -> Iterator[tuple[bytes, bool]]:
    at = 0
    while at < len(tree):
        end = tree.index(b"\0", at)
        if not tree.startswith(_GITLINK, at):  # a submodule's commit is not in here
            yield tree[end + 1 : end + 1 + ID_BYTES], not tree.startswith(_TREE, at)
        at = end + 1 + ID_BYTES


def loose(data: bytes, budget: Budget) -> Object:
    """A file of ``objects/xx``."""
    plain = _inflated(data, 0, OBJECT_BYTES_MAX)
    budget.unpack(len(plain))
    head, _, content = plain.partition(b"\0")
    kind, _, size = head.partition(b" ")
    if int(size) != len(content):
        raise ValueError("a loose object of another size")
    return Object(kind, content)


def _inflated(data: bytes, at: int, size_max: int) -> bytes:
    """In pieces: what is behind an object is not to be copied for each."""
    unpacker = zlib.decompressobj()
    view = memoryview(data)
    out = bytearray()
    while not unpacker.eof:
        if at >= len(view):
            raise ValueError("an object that is cut")
        out += unpacker.decompress(view[at : at + PIECE_BYTES], size_max + 1 - len(out))
        if len(out) > size_max:
            raise ValueError("an object that is larger than it says")
        at += PIECE_BYTES
    return bytes(out)


class Pack:
    """The objects of one pack by its index (version 2)."""

    def __init__(self, pack: bytes, idx: bytes, budget: Budget) -> None:
        if not idx.startswith(_IDX_MAGIC) or not pack.startswith(_PACK_MAGIC):
            raise ValueError("not a pack and its index")
        self._pack, self._budget = pack, budget
        count = struct.unpack_from(">I", idx, _IDX_HEADER_BYTES - 4)[0]
        if count * (ID_BYTES + 8) > len(idx):
            raise ValueError("an index of another size")
        if count > OBJECTS_MAX:
            raise TooMuch("git objects in a pack")
        ids = _IDX_HEADER_BYTES
        offsets = ids + count * (ID_BYTES + 4)
        large = offsets + count * 4
        self.offsets: dict[bytes, int] = {}
        larges = 0
        for number in range(count):
            at = ids + number * ID_BYTES
            offset = struct.unpack_from(">I", idx, offsets + number * 4)[0]
            if offset & _LARGE_OFFSET:
                larges += 1
                place = large + (offset & ~_LARGE_OFFSET) * 8
                offset = struct.unpack_from(">Q", idx, place)[0]
            self.offsets[idx[at : at + ID_BYTES]] = offset
        if len(idx) != large + larges * 8 + 2 * ID_BYTES:
            raise ValueError("an index of another size, or with ids of SHA-256")

    def read(self, id: bytes) -> Object:
        """An object, its deltas applied. Raises ``KeyError`` where it is not here, and
        ``ValueError`` where it is another one."""
        item = self._at(self.offsets[id])
        if item.id != id:
            raise ValueError("an object under another one's id")
        return item

    def _at(self, offset: int) -> Object:
        deltas: list[bytes] = []
        seen: set[int] = set()
        while True:
            if offset in seen or len(deltas) > DELTA_DEPTH_MAX:
                raise ValueError("a chain of deltas without end")
            seen.add(offset)
            kind, size, at = self._header(offset)
            if kind in _KINDS:
                self._budget.unpack(size)
                content = _inflated(self._pack, at, size)
                while deltas:
                    content = patched(content, deltas.pop())
                    self._budget.unpack(len(content))
                return Object(_KINDS[kind], content)
            if kind == _OFS_DELTA:
                back, at = self._back(at)
                base = offset - back
            elif kind == _REF_DELTA:
                base = self.offsets[self._pack[at : at + ID_BYTES]]
                at += ID_BYTES
            else:
                raise ValueError(f"an object of kind {kind}")
            self._budget.unpack(size * DELTA_COST)
            if size + sum(map(len, deltas)) > OBJECT_BYTES_MAX:
                raise TooMuch("deltas of one git object")
            deltas.append(_inflated(self._pack, at, size))
            offset = base

    def _header(self, at: int) -> tuple[int, int, int]:
        byte = self._pack[at]
        kind, size, shift = byte >> 4 & 7, byte & 15, 4
        while byte & 0x80:
            at += 1
            byte = self._pack[at]
            size |= (byte & 0x7F) << shift
            shift += 7
        if size > OBJECT_BYTES_MAX:
            raise TooMuch("one git object")
        return kind, size, at + 1

    def _back(self, at: int) -> tuple[int, int]:
        byte = self._pack[at]
        back = byte & 0x7F
        while byte & 0x80:
            at += 1
            byte = self._pack[at]
            back = (back + 1) << 7 | byte & 0x7F
        if back <= 0:
            raise ValueError("a delta upon itself")
        return back, at + 1


def patched(base: bytes, delta: bytes) -> bytes:
    """``delta`` applied to ``base``."""
    size, at = _varint(delta, 0)
    if size != len(base):
        raise ValueError("a delta for another base")
    size, at = _varint(delta, at)
    if size > OBJECT_BYTES_MAX:
        raise ValueError("a delta that makes too much")
    out = bytearray()
    while at < len(delta):
        op = delta[at]
        at += 1
        if op & 0x80:
            start, length, at = _copy(delta, op, at)
            out += base[start : start + length]
        elif op:
            out += delta[at : at + op]
            at += op
        else:
            raise ValueError("a delta with a reserved instruction")
        if len(out) > size:
            raise ValueError("a delta that makes too much")
    if len(out) != size:
        raise ValueError("a delta that makes too little")
    return bytes(out)


def _copy(delta: bytes, op: int, at: int) -> tuple[int, int, int]:
    values = []
    for bits in (range(4), range(4, 7)):
        value = 0
        for shift, bit in enumerate(bits):
            if op >> bit & 1:
                value |= delta[at] << 8 * shift
                at += 1
        values.append(value)
    return values[0], values[1] or 0x10000, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def staged(index: bytes) -> Iterator[bytes]:
    """The ids of blobs in an index file (versions 2 to 4)."""
    magic, version, count = struct.unpack_from(">4sII", index, 0)
    if magic != _INDEX_MAGIC or version not in (2, 3, 4):
        raise ValueError("not an index")
    at = 12
    for _ in range(count):
        mode = struct.unpack_from(">I", index, at + 24)[0]
        if mode >> 12 != 0o16:
            yield index[at + 40 : at + 60]
        flags = struct.unpack_from(">H", index, at + 60)[0]
        head = 64 if flags & 0x4000 else 62
        name = at + head
        if version == 4:
            while index[name] & 0x80:
                name += 1
            at = index.index(b"\0", name + 1) + 1
        else:
            end = index.index(b"\0", name)
            at += (end - at) // 8 * 8 + 8


def written(
    ids: Iterable[bytes], read: Callable[[bytes], Object], budget: Budget
) -> tuple[bytes, bytes, str]:
    """A pack of objects without deltas, read one at a time, its index, and the name of
    both."""
    ordered = sorted(ids)
    out = bytearray(struct.pack(">4sII", _PACK_MAGIC, 2, len(ordered)))
    places: dict[bytes, tuple[int, int]] = {}
    for id in ordered:
        item = read(id)
        start = len(out)
        size = len(item.content)
        byte, size = _NUMBERS[item.kind] << 4 | size & 15, size >> 4
        while size:
            out.append(byte | 0x80)
            byte, size = size & 0x7F, size >> 7
        out.append(byte)
        out += zlib.compress(item.content, 1)
        with memoryview(out) as view:  # none may be there when it grows
            places[id] = (start, zlib.crc32(view[start:]))
        budget.hold(len(out) - start)  # far less than offsets of 31 bits allow
    trailer = hashlib.sha1(out, usedforsecurity=False).digest()
    out += trailer
    idx = bytearray(_IDX_MAGIC)
    firsts = [id[0] for id in places]
    for first in range(256):
        idx += struct.pack(">I", bisect.bisect_right(firsts, first))
    idx += b"".join(places)
    idx += b"".join(struct.pack(">I", crc) for _, crc in places.values())
    idx += b"".join(struct.pack(">I", at) for at, _ in places.values())
    idx += trailer
    idx += hashlib.sha1(idx, usedforsecurity=False).digest()
    return bytes(out), bytes(idx), f"pack-{trailer.hex()}"
