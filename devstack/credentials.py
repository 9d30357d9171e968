"""The stack's passwords and the account key, made once and kept in one 0600 file.

Owns: ``credentials.json`` in the state directory. Why kept: a restarted local system
opens the same database and signs with the same account key.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

import nkeys

NATS_USERS = ("auth", "scheduler", "imagesvc", "audit", "burst", "sys")
_PASSWORD_BYTES = 24
_SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Credentials:
    """Everything secret. ``account_seed`` is the nkey seed (``SA…``) whose public key
    is the auth callout's issuer."""

    account_seed: str
    nats_passwords: dict[str, str]
    pg_password: str
    redis_password: str

    @property
    def account_public(self) -> str:
        """The account's public nkey (``A…``)."""
        public: bytes = nkeys.from_seed(self.account_seed.encode()).public_key
        return public.decode()


def load_or_make(path: Path) -> Credentials:
    """Read ``path``; make it (mode 0600) when it is not there."""
    if path.exists():
        return Credentials(**json.loads(path.read_text()))
    made = _make()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(made), file)
    return made


def _make() -> Credentials:
    seed: bytes = nkeys.encode_seed(secrets.token_bytes(_SEED_BYTES), nkeys.PREFIX_BYTE_ACCOUNT)
    return Credentials(
        account_seed=seed.decode(),
        nats_passwords={user: secrets.token_urlsafe(_PASSWORD_BYTES) for user in NATS_USERS},
        pg_password=secrets.token_urlsafe(_PASSWORD_BYTES),
        redis_password=secrets.token_urlsafe(_PASSWORD_BYTES),
    )
