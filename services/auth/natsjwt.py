"""The JWTs of NATS's auth callout: reading a request, signing an answer. Pure.

Owns: their form (ed25519-nkey, account-signed). Does not own: who is let in
(:mod:`services.auth.callout`).
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import msgspec
import nkeys

from schemas.base import encode
from services.auth.permissions import Permissions

REQUEST_SUBJECT = "$SYS.REQ.USER.AUTH"
REQUEST_AUDIENCE = "nats-authorization-request"
REFUSED = "authorization failed"
"""All that a refused client learns."""
NO_LIMIT = -1


class BadRequestToken(ValueError):
    """What the server sent is not an authorization request."""


@dataclass(frozen=True, slots=True)
class ConnectRequest:
    """Who wants in: the server's id, the connection's one-time public key and what
    the client presented. ``repr`` hides the latter."""

    server: str
    user_nkey: str
    token: str

    def __repr__(self) -> str:
        return f"ConnectRequest({self.server}, {self.user_nkey})"


class _ServerId(msgspec.Struct):
    id: str


class _ConnectOptions(msgspec.Struct):
    auth_token: str = ""
    jwt: str = ""


class _Nats(msgspec.Struct):
    server_id: _ServerId
    user_nkey: str
    connect_opts: _ConnectOptions = msgspec.field(default_factory=_ConnectOptions)


class _Request(msgspec.Struct):
    aud: str
    nats: _Nats


_decoder = msgspec.json.Decoder(_Request)


def read_request(data: bytes) -> ConnectRequest:
    """The request in the server's JWT. Raises :class:`BadRequestToken`. Its signature
    proves nothing here (the key is the server's own say-so): what counts is that
    only the server may publish on the subject."""
    parts = data.split(b".")
    if len(parts) != 3:
        raise BadRequestToken("not a JWT")
    try:
        claims = _decoder.decode(_unpadded(parts[1]))
    except (msgspec.DecodeError, ValueError) as exc:
        raise BadRequestToken(str(exc)) from exc
    if claims.aud != REQUEST_AUDIENCE:
        raise BadRequestToken(f"audience {claims.aud!r}")
    options = claims.nats.connect_opts
    return ConnectRequest(
        claims.nats.server_id.id, claims.nats.user_nkey, options.auth_token or options.jwt
    )


class Signer:
    """Signs with the account's key. ``seed`` is an account nkey seed (``SA…``)."""

    def __init__(self, seed: str, *, account: str) -> None:
        self._pair = nkeys.from_seed(seed.encode())
        self.public = self._pair.public_key.decode()
        self._account = account

    def user(
        self, request: ConnectRequest, permissions: Permissions, *,
        name: str, now: float, expires_at: float,
    ) -> str:  # fmt: skip
        """The JWT that lets the connection in until ``expires_at``."""
        claims = self._claims(request.user_nkey, self._account, now=now)
        claims |= {
            "name": name,
            "exp": int(expires_at),
            "nats": {
                "pub": {"allow": permissions.publish},
                "sub": {"allow": permissions.subscribe},
                "subs": NO_LIMIT,
                "data": NO_LIMIT,
                "payload": NO_LIMIT,
                "type": "user",
                "version": 2,
            },
        }
        return self._sign(claims)

    def answer(
        self, request: ConnectRequest, *, now: float, user: str | None = None
    ) -> bytes:
        """The server's answer: let ``user`` in, or (``None``) refuse."""
        outcome = {"jwt": user} if user else {"error": REFUSED}
        claims = self._claims(request.user_nkey, request.server, now=now)
        claims["nats"] = {**outcome, "type": "authorization_response", "version": 2}
        return self._sign(claims).encode()

    def _claims(self, subject: str, audience: str, *, now: float) -> dict[str, Any]:
        return {"iss": self.public, "sub": subject, "aud": audience, "iat": int(now)}

    def _sign(self, claims: dict[str, Any]) -> str:
        signed = f"{_HEADER}.{_padded(encode(claims))}"
        return f"{signed}.{_padded(self._pair.sign(signed.encode()))}"


def _padded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unpadded(data: bytes) -> bytes:
    return base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))


_HEADER = _padded(b'{"typ":"JWT","alg":"ed25519-nkey"}')


def mint_seed(random: bytes) -> tuple[str, str]:
    """``(seed, public key)`` of a new account nkey, from 32 random bytes."""
    seed = nkeys.encode_seed(random, nkeys.PREFIX_BYTE_ACCOUNT).decode()
    return seed, nkeys.from_seed(seed.encode()).public_key.decode()
