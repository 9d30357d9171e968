"""Tokens of an OIDC issuer: verified by PyJWT, mapped to a principal and projects.

Owns: which claims count. Does not own: the issuer's keys beyond a cache of them, nor
what a grant means. Off unless an issuer is configured.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from services.auth.delegation import known
from services.auth.settings import Settings
from shared import ids
from shared.errors import Unauthenticated, Unavailable

log = logging.getLogger(__name__)

LEEWAY_S = 30
FETCH_S = 5
KEYS_LIFE_S = 600
SYMMETRIC = ("HS", "none")


@dataclass(frozen=True, slots=True)
class OidcUser:
    """A verified token's content: the principal it stands for, a display name, grants
    by project, and when it ends (seconds since the epoch)."""

    principal: str
    name: str
    grants: Mapping[str, frozenset[str]]
    expires_at: float


def principal_id(issuer: str, subject: str) -> str:
    """The principal of an issuer's subject; the SDK computes the same."""
    return ids.derived(f"{issuer}\n{subject}")


def project_grants(claim: Any, default: frozenset[str]) -> dict[str, frozenset[str]]:
    """Grants by project from the claim: a list of ids, or ids → lists of grants.
    What is not of this form, or names no known grant, counts for nothing."""
    if isinstance(claim, list):
        return {p: default for p in claim if isinstance(p, str)}
    if not isinstance(claim, dict):
        return {}
    return {
        project: frozenset(g for g in grants if isinstance(g, str) and known(g))
        for project, grants in claim.items()
        if isinstance(project, str) and isinstance(grants, list)
    }


class Verifier:
    """Verifies tokens of the one issuer in ``settings``."""

    def __init__(self, settings: Settings) -> None:
        if not settings.oidc_issuer or not settings.oidc_audience:
            raise ValueError("OIDC needs an issuer and an audience")
        self._issuer = settings.oidc_issuer
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_projects_claim
        self._default = frozenset(settings.oidc_grants.split(","))
        self._algorithms = [
            a for a in settings.oidc_algorithms.split(",") if not a.startswith(SYMMETRIC)
        ]
        source = settings.oidc_jwks or f"{self._issuer.rstrip('/')}/.well-known/jwks.json"
        self._set: jwt.PyJWKSet | None = None
        self._client: jwt.PyJWKClient | None = None
        if source.startswith(("http://", "https://")):
            self._client = jwt.PyJWKClient(source, lifespan=KEYS_LIFE_S, timeout=FETCH_S)
        else:
            self._set = jwt.PyJWKSet.from_dict(json.loads(Path(source).read_text("utf-8")))

    async def verify(self, token: str) -> OidcUser:
        """The token's user. Raises ``Unauthenticated``, or ``Unavailable`` while the
        issuer's keys cannot be had."""
        try:
            key = await asyncio.to_thread(self._key, token)
            claims = jwt.decode(
                token, key, algorithms=self._algorithms, audience=self._audience,
                issuer=self._issuer, leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )  # fmt: skip
        except jwt.PyJWKClientConnectionError as exc:
            raise Unavailable("the issuer's keys cannot be had") from exc
        except jwt.PyJWTError as exc:
            raise Unauthenticated(f"the token is not valid: {type(exc).__name__}") from exc
        name = str(claims.get("email") or claims.get("name") or claims["sub"])[:63]
        return OidcUser(
            principal_id(self._issuer, claims["sub"]), name,
            project_grants(claims.get(self._claim), self._default), float(claims["exp"]),
        )  # fmt: skip

    def _key(self, token: str) -> jwt.PyJWK:
        if self._client is not None:
            return self._client.get_signing_key_from_jwt(token)
        assert self._set is not None
        wanted = jwt.get_unverified_header(token).get("kid")
        for key in self._set.keys:
            if wanted is None or key.key_id == wanted:
                return key
        raise jwt.InvalidKeyError("no such key")
