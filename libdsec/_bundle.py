"""Bundles: many small files in one stream (see the exec schemas). Pure.

Owns: the byte format, both ways, within bounds. Does not own: which files, and where
they go.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from libdsec.errors import InternalError

NAME, TYPE, SIZE, MODE, MTIME_NS, TARGET, CONTENT = 70, 71, 72, 73, 76, 77, 69
SMALL_BYTES = 256 * 1024
"""Files up to this size travel in bundles, larger ones alone."""
ENTRY_BYTES_MAX = 2 * 1024 * 1024
"""Most that one entry of a sandbox may hold here."""

_FIELD = struct.Struct("<BI")
_NUMBER = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Entry:
    """``kind``: ``f`` file, ``d`` directory, ``l`` symbolic link, ``h`` another name of
    the file ``target``. Names are relative. ``size`` is told where no content is."""

    kind: str
    name: str
    mode: int = 0
    mtime_ns: int | None = None
    target: str = ""
    content: bytes = b""
    size: int = 0


def _field(tag: int, value: bytes) -> bytes:
    return _FIELD.pack(tag, len(value)) + value


def pack(entry: Entry) -> bytes:
    """One entry's bytes."""
    parts = [
        _field(NAME, _raw(entry.name)),
        _field(TYPE, entry.kind.encode()),
        _field(MODE, _NUMBER.pack(entry.mode)),
    ]
    if entry.mtime_ns is not None:
        parts.append(_field(MTIME_NS, _NUMBER.pack(max(entry.mtime_ns, 0))))
    if entry.target:
        parts.append(_field(TARGET, _raw(entry.target)))
    parts.append(_field(CONTENT, entry.content))
    return b"".join(parts)


def names(given: list[str]) -> bytes:
    """The request for a bundle of these files."""
    return b"".join(_raw(name) + b"\0" for name in given)


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


class Unbundler:
    """Cuts a stream into entries; holds at most one that is not complete."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> list[Entry]:
        """The entries that are complete now. Raises ``InternalError`` for what is no
        bundle."""
        data = self._held + data if self._held else data
        found, begun, at = [], 0, 0
        fields: dict[int, bytes] = {}
        while len(data) - at >= _FIELD.size:
            tag, size = _FIELD.unpack_from(data, at)
            if size > ENTRY_BYTES_MAX:
                raise InternalError(f"an entry of {size} bytes in a bundle")
            end = at + _FIELD.size + size
            if end > len(data):
                break
            fields[tag] = data[at + _FIELD.size : end]
            at = end
            if tag == CONTENT:
                found.append(_entry(fields))
                fields, begun = {}, at
        self._held = data[begun:]
        if len(self._held) > 2 * ENTRY_BYTES_MAX:
            raise InternalError("an entry without an end in a bundle")
        return found

    def close(self) -> None:
        """Raises ``InternalError`` where the stream broke off."""
        if self._held:
            raise InternalError("a bundle ended within an entry", retryable=True)


def _entry(fields: dict[int, bytes]) -> Entry:
    return Entry(
        kind=fields.get(TYPE, b"").decode("latin-1"),
        name=_text(fields.get(NAME, b"")),
        mode=_number(fields.get(MODE, b"")),
        mtime_ns=_number(fields.get(MTIME_NS, b"")),
        target=_text(fields.get(TARGET, b"")),
        content=fields[CONTENT],
        size=_number(fields.get(SIZE, b"")),
    )


def _number(raw: bytes) -> int:
    return int.from_bytes(raw[:8], "little")
