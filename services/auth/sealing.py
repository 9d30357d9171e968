"""Values of secrets as they lie in the database: AES-256-GCM under keys of the environment.

Owns: sealing and opening, and which key did it. Does not own: rows. A sealed value is
bound to its project and name: whoever can write rows cannot make it another secret's.
The first key seals, all of them open: a new one is put first, and the old one is taken
away when no row needs it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shared.errors import Internal, InvalidRequest, Unsupported

KEY_BYTES, NONCE_BYTES, MARK_BYTES = 32, 12, 4


class Sealer:
    """``keys``: base64 of 32 bytes each, separated by commas; none: nothing is kept.
    Raises ``InvalidRequest`` where one is no key."""

    def __init__(self, keys: str | None) -> None:
        self._keys: dict[bytes, AESGCM] = {}
        for text in filter(None, (k.strip() for k in (keys or "").split(","))):
            raw = _key(text)
            self._keys[hashlib.sha256(raw).digest()[:MARK_BYTES]] = AESGCM(raw)

    def __repr__(self) -> str:
        return f"Sealer({len(self._keys)} keys)"

    def seal(self, value: str, *, project: str, name: str) -> bytes:
        """Raises ``Unsupported`` where there is no key."""
        if not self._keys:
            raise Unsupported("auth keeps no secrets: it was given no key", field="name")
        mark, key = next(iter(self._keys.items()))
        nonce = os.urandom(NONCE_BYTES)
        return mark + nonce + key.encrypt(nonce, value.encode(), _bound(project, name))

    def open(self, sealed: bytes, *, project: str, name: str) -> str:
        """Raises ``Internal`` where no key opens it, or it is another secret's."""
        mark, rest = sealed[:MARK_BYTES], sealed[MARK_BYTES:]
        key = self._keys.get(mark)
        if key is None:
            raise Internal(f"no key opens secret {name} of {project}")
        try:
            value = key.decrypt(rest[:NONCE_BYTES], rest[NONCE_BYTES:], _bound(project, name))
        except InvalidTag:
            raise Internal(f"secret {name} of {project} was changed where it lies") from None
        return value.decode()


def _bound(project: str, name: str) -> bytes:
    return f"{project}/{name}".encode()


def _key(text: str) -> bytes:
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error:
        raw = b""
    if len(raw) != KEY_BYTES:
        raise InvalidRequest(f"a key is base64 of {KEY_BYTES} bytes", field="auth_secret_keys")
    return raw
