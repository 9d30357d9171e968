"""Git's objects, read from bytes: loose ones, packs, the index; and packs written. Pure.

Owns: the formats (SHA-1). Does not own: which objects there are or are needed
(:mod:`services.edge.scrubgit`). Everything read here was written by a sandbox: sizes are
bounded, and what is malformed raises one of :data:`MALFORMED`.
"""

from __future__ import annotations

import bisect
import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MALFORMED = (ValueError, KeyError, IndexError, struct.error, zlib.error)
OBJECT_BYTES_MAX = 256 * 1024 * 1024
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


@dataclass(frozen=True, slots=True)
class Object:
    """One object: ``kind`` is commit, tree, blob or tag."""

    kind: bytes
    content: bytes

    @property
    def id(self) -> bytes:
        head = b"%s %d\0" % (self.kind, len(self.content))
        return hashlib.sha1(head + self.content, usedforsecurity=False).digest()

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


def loose(data: bytes) -> Object:
    """A file of ``objects/xx``."""
    plain = _inflated(data, 0, OBJECT_BYTES_MAX)
    head, _, content = plain.partition(b"\0")
    kind, _, size = head.partition(b" ")
    if int(size) != len(content):
        raise ValueError("a loose object of another size")
    return Object(kind, content)


def _inflated(data: bytes, at: int, size_max: int) -> bytes:
    unpacker = zlib.decompressobj()
    plain = unpacker.decompress(memoryview(data)[at:], size_max + 1)
    if len(plain) > size_max or not unpacker.eof:
        raise ValueError("an object that is cut or too large")
    return plain


class Pack:
    """The objects of one pack by its index (version 2)."""

    def __init__(self, pack: bytes, idx: bytes) -> None:
        if not idx.startswith(_IDX_MAGIC) or not pack.startswith(_PACK_MAGIC):
            raise ValueError("not a pack and its index")
        self._pack = pack
        count = struct.unpack_from(">I", idx, _IDX_HEADER_BYTES - 4)[0]
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
        """An object, its deltas applied. Raises ``KeyError`` where it is not here."""
        return self._at(self.offsets[id])

    def _at(self, offset: int) -> Object:
        deltas: list[bytes] = []
        while True:
            if len(deltas) > DELTA_DEPTH_MAX:
                raise ValueError("a chain of deltas without end")
            kind, size, at = self._header(offset)
            if kind in _KINDS:
                content = _inflated(self._pack, at, size)
                for delta in reversed(deltas):
                    content = patched(content, delta)
                return Object(_KINDS[kind], content)
            if kind == _OFS_DELTA:
                back, at = self._back(at)
                base = offset - back
            elif kind == _REF_DELTA:
                base = self.offsets[self._pack[at : at + ID_BYTES]]
                at += ID_BYTES
            else:
                raise ValueError(f"an object of kind {kind}")
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
            raise ValueError("an object that is too large")
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
        if len(out) > size or size > OBJECT_BYTES_MAX:
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


def written(objects: Mapping[bytes, Object]) -> tuple[bytes, bytes, str]:
    """A pack of ``objects`` without deltas, its index, and the name of both."""
    out = bytearray(struct.pack(">4sII", _PACK_MAGIC, 2, len(objects)))
    places: dict[bytes, tuple[int, int]] = {}
    for id, item in sorted(objects.items()):
        start = len(out)
        size = len(item.content)
        byte, size = _NUMBERS[item.kind] << 4 | size & 15, size >> 4
        while size:
            out.append(byte | 0x80)
            byte, size = size & 0x7F, size >> 7
        out.append(byte)
        out += zlib.compress(item.content, 1)
        places[id] = (start, zlib.crc32(memoryview(out)[start:]))
    if len(out) >= _LARGE_OFFSET:
        raise ValueError("a pack that is too large")
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
