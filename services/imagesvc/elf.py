"""What an ELF file is linked to.

Owns: the parts of the format that name an interpreter and libraries (64 bit, little endian).
Does not own: where libraries are. Files are untrusted: whatever does not fit is no ELF file,
and every size is bounded.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

HEAD_BYTES = 64
SEGMENTS_MAX, DYNAMIC_BYTES_MAX, NAMES_BYTES_MAX = 64, 64 * 1024, 1024 * 1024
NEEDED_MAX = 256
NAME_MAX = 4096
_MAGIC = b"\x7fELF\x02\x01"
_SEGMENT = struct.Struct("<IIQQQQQQ")
_LOAD, _DYNAMIC, _INTERP = 1, 2, 3
_NEEDED, _STRTAB, _STRSZ, _RPATH, _RUNPATH = 1, 5, 10, 15, 29

Read = Callable[[int, int], bytes]
"""Bytes at an offset, at most so many; fewer at the end."""


@dataclass(frozen=True, slots=True)
class Linked:
    """``names`` of libraries, ``paths`` where the file itself says they are."""

    interpreter: bytes
    names: tuple[bytes, ...]
    paths: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    bytes: int


def linked(read: Read) -> Linked | None:
    """``None`` for what is no ELF file that can be read."""
    head = read(0, HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(_MAGIC):
        return None
    (at,) = struct.unpack_from("<Q", head, 32)
    size, count = struct.unpack_from("<HH", head, 54)
    if size != _SEGMENT.size or count > SEGMENTS_MAX:
        return None
    table = read(at, size * count)
    if len(table) < size * count:
        return None
    segments = [_Segment(s[0], s[2], s[3], s[5]) for s in _SEGMENT.iter_unpack(table)]
    named = next((s for s in segments if s.kind == _INTERP), None)
    interpreter = read(named.offset, min(named.bytes, NAME_MAX)) if named else b""
    names, paths = _dynamic(read, segments)
    return Linked(interpreter.split(b"\0", 1)[0], names, paths)


def _dynamic(
    read: Read, segments: list[_Segment]
) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
    found = next((s for s in segments if s.kind == _DYNAMIC), None)
    if found is None:
        return (), ()
    data = read(found.offset, min(found.bytes, DYNAMIC_BYTES_MAX))
    entries = list(struct.iter_unpack("<QQ", data[: len(data) // 16 * 16]))
    known = dict(entries)
    at = _offset(segments, known.get(_STRTAB, 0))
    if at is None:
        return (), ()
    text = read(at, min(known.get(_STRSZ, 0), NAMES_BYTES_MAX))

    def name(start: int) -> bytes:
        return text[start : start + NAME_MAX].split(b"\0", 1)[0]

    names = [name(value) for tag, value in entries if tag == _NEEDED][:NEEDED_MAX]
    places = b":".join(name(known[tag]) for tag in (_RPATH, _RUNPATH) if tag in known)
    return tuple(filter(None, names)), tuple(filter(None, places.split(b":")))


def _offset(segments: list[_Segment], address: int) -> int | None:
    """Where in the file an address lies."""
    for one in segments:
        if one.kind == _LOAD and one.address <= address < one.address + one.bytes:
            return one.offset + address - one.address
    return None
