"""Identifiers as the system makes them: ULIDs, uids of a batch, principals.

The same rules as the services'; a test holds the two together. Pure but for
:func:`new`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import time

from libdsec.errors import InvalidRequest

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
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
    """A fresh ULID, lower case."""
    return _stamp(time.time_ns() // 1_000_000) + _random_part()


def is_ulid(text: str) -> bool:
    """Whether ``text`` is a ULID in lower case."""
    return bool(_ULID.match(text))


def is_token(text: str) -> bool:
    """Whether ``text`` can be one token of a subject."""
    return bool(_TOKEN.match(text))


def item_uid(request_id: str, index: int) -> str:
    """The uid of sandbox ``index`` of a request; index 0 is the request id."""
    if index == 0:
        return request_id
    digest = hashlib.sha256(f"{request_id}/{index}".encode()).digest()
    return request_id[:10] + _encode(int.from_bytes(digest[:10], "big"))[10:]


def named(*parts: str) -> str:
    """The id, formed as a ULID, that these words always have."""
    digest = hashlib.sha256("\n".join(parts).encode()).digest()
    return _encode(int.from_bytes(digest[:16], "big") >> 3)


def uid_of(sandbox_id: str) -> str:
    """The uid of a public id ``<node>-<uid>`` or of a bare uid."""
    uid = sandbox_id.rpartition("-")[2]
    if not is_ulid(uid):
        raise InvalidRequest(f"{sandbox_id!r} is not a sandbox id", field="id")
    return uid


def principal_of(credential: str) -> str:
    """Whose credential this is: the second part of an API key
    (``dsec_<principal>_<secret>``), or a token's issuer and subject, hashed."""
    parts = credential.split("_", 2)
    if len(parts) == 3 and parts[0] == "dsec" and is_ulid(parts[1]):
        return parts[1]
    try:
        body = credential.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
        subject = f"{claims['iss']}\n{claims['sub']}"
    except (IndexError, KeyError, TypeError, ValueError, binascii.Error):
        raise InvalidRequest(
            "this is neither an API key (dsec_<principal>_<secret>) nor a token", field="api_key"
        ) from None
    digest = hashlib.sha256(subject.encode()).digest()
    return _encode(int.from_bytes(digest[:16], "big"))
