"""Identifiers: ULIDs, the uids of a batch, the public id that carries its route.

Pure but for :func:`new`, which reads the clock and the system's randomness.
"""

from __future__ import annotations

import hashlib
import os
import re
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford base 32, lower case
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_SPELLED = _ALPHABET.encode() * 8  # each random byte as five bits of it
RANDOM_CHARS = 16  # of an id
RANDOM_STORE = 128  # fetched at once
_ULID = re.compile(r"^[0-7][0-9a-hjkmnp-tv-z]{25}\Z")
_TOKEN = re.compile(r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")


def _encode(value: int, bits: int = 130) -> str:
    return "".join([_PAIRS[(value >> shift) & 1023] for shift in range(bits - 10, -1, -10)])


_random: list[str] = []
_stamped = (0, "")
os.register_at_fork(after_in_child=_random.clear)


def _random_part() -> str:
    """From a store of them: each question to the kernel lets another thread take over."""
    try:
        return _random.pop()
    except IndexError:
        drawn = os.urandom(RANDOM_CHARS * RANDOM_STORE).translate(_SPELLED).decode()
        first, *others = (drawn[at : at + 16] for at in range(0, len(drawn), 16))
        _random.extend(others)
        return first


def _stamp(milliseconds: int) -> str:
    global _stamped
    last, text = _stamped  # as one: other threads ask too
    if last != milliseconds:
        text = _encode(milliseconds, 50)
        _stamped = (milliseconds, text)
    return text


def new() -> str:
    """A fresh ULID (lower case): 48 bits of milliseconds, 80 bits of randomness."""
    return _stamp(time.time_ns() // 1_000_000) + _random_part()


def is_ulid(text: str) -> bool:
    """Whether ``text`` is a ULID in the lower-case form used here."""
    return bool(_ULID.match(text))


def item_uid(request_id: str, index: int) -> str:
    """The uid of sandbox ``index`` of a request: a function of both, so that a
    repeated request names the same sandboxes. Index 0 is the request id itself."""
    if index == 0:
        return request_id
    digest = hashlib.sha256(f"{request_id}/{index}".encode()).digest()
    return request_id[:10] + _encode(int.from_bytes(digest[:10], "big"))[10:]


def derived(text: str) -> str:
    """An id that is a function of ``text`` (128 bits of its SHA-256)."""
    return _encode(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "big"))


def sandbox_id(node: str, uid: str) -> str:
    """The public id ``<node>-<uid>``."""
    return f"{node}-{uid}"


def split_sandbox_id(sandbox_id: str) -> tuple[str, str]:
    """``(node, uid)`` of a public id. Raises ``ValueError`` when it is not one."""
    node, _, uid = sandbox_id.rpartition("-")
    if not is_ulid(uid) or not _TOKEN.match(node):
        raise ValueError(f"{sandbox_id!r} is not a sandbox id (<node>-<uid>)")
    return node, uid


def is_token(text: str) -> bool:
    """Whether ``text`` can be one token of a subject."""
    return bool(_TOKEN.match(text))
