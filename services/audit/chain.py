"""The hash chain over the record. Pure.

Each entry's hash covers its number, its kind, its content and the hash before it:
a change, a removal or an insertion anywhere breaks every later link. Content is
hashed in one spelling, which can be made again from what is stored: older entries have
been through ``jsonb``, which keeps neither key order nor the spelling of numbers.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

GENESIS = bytes(32)
"""What the first entry is chained to."""

_encoder = msgspec.json.Encoder(order="sorted")


def clean(value: Any) -> Any:
    """``value`` as it can be hashed: whole floats as integers, no NUL (which columns cannot
    store; it becomes U+FFFD). JSON values only."""
    if isinstance(value, str):
        return value.replace("\0", "\ufffd") if "\0" in value else value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    return value


def canonical(record: dict[str, Any] | msgspec.Struct) -> bytes:
    """The one spelling of a clean record: JSON with sorted keys."""
    return _encoder.encode(record)


def link(previous: bytes, seq: int, kind: str, content: bytes) -> bytes:
    """The hash (32 bytes) of entry ``seq`` with that :func:`canonical` content."""
    return hashlib.sha256(b"%s%d\0%s\0%s" % (previous, seq, kind.encode(), content)).digest()
