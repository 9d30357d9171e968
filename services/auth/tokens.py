"""API keys: how they look, how they are made, what of them is stored. Pure.

Owns: the form ``dsec_<principal>_<secret>`` and its hash. Does not own: storage
(:mod:`services.auth.iam_store`), tokens of an OIDC issuer (:mod:`services.auth.oidc`).

The hash is one plain SHA-256: a secret carries 256 bits of randomness, so a slow hash
would protect nothing and would cost every connect.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

_KEY = re.compile(r"^dsec_([0-7][0-9a-hjkmnp-tv-z]{25})_([A-Za-z0-9_-]{32,128})\Z")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as a client shows it. ``repr`` hides the secret."""

    principal: str
    text: str

    def __repr__(self) -> str:
        return f"ApiKey({self.principal}, …)"


def parse(text: str) -> ApiKey | None:
    """The key in ``text``, or ``None`` where it is not one."""
    match = _KEY.match(text)
    return ApiKey(match.group(1), text) if match else None


def derive(root: bytes, principal: str, key_id: str) -> str:
    """The text of key ``key_id``: a function of a random id and a secret of the
    service, so that a repeated request gets the same key again although only its
    hash is stored. ``root`` comes from :func:`root_secret`."""
    digest = hmac.new(root, f"{principal}/{key_id}".encode(), hashlib.sha256).digest()
    secret = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
    return f"dsec_{principal}_{secret}"


def root_secret(account_seed: str) -> bytes:
    """The secret that keys are derived from: whoever has the seed can sign any
    user anyway, so nothing more is lost with it."""
    return hmac.new(account_seed.encode(), b"dsec api keys v1", hashlib.sha256).digest()


def key_hash(text: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(text.encode()).digest()


def matches(text: str, stored: bytes) -> bool:
    """Whether ``text`` is the key of ``stored``, in constant time."""
    return hmac.compare_digest(key_hash(text), stored)
