"""The first identities: root project, its administrator, keys of nodes.

Owns: making them once, and handing their secrets over in one file that only its owner
reads. Does not own: anything later (that is done over the bus, as everyone does it).

Repeating it changes nothing and writes the same secrets again: a key's text is a
function of its id and the account's seed (:mod:`services.auth.tokens`). After a change
of the seed it makes new keys beside the old ones, which are then to be revoked.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.iam import KeyInfo
from services.auth import changes, iam_store, natsjwt, tokens
from shared import ids
from shared.db import Database
from shared.errors import Conflict, InvalidRequest

ADMIN = "admin"
SEED_BYTES = 32
ALL = ["*"]


@dataclass(frozen=True, slots=True)
class Secrets:
    """API keys as text: the administrator's, and by name those of nodes."""

    project: str
    admin_key: str
    node_keys: dict[str, str]

    def __repr__(self) -> str:
        return f"Secrets(project={self.project!r}, nodes={sorted(self.node_keys)})"


async def bootstrap(
    dsn: str, account_seed: str, *, project: str = "root", nodes: Sequence[str] = ()
) -> Secrets:
    """Makes what is missing in auth's database (``dsn`` of its own role, tables in
    place); returns all secrets. Safe to repeat and to run twice at once. Raises
    ``Conflict`` where the root is another project."""
    for name in (project, *nodes):
        if not ids.is_token(name):
            raise InvalidRequest(f"{name!r} is not lower case letters, digits, hyphens")
    root_secret = tokens.root_secret(account_seed)
    db = Database(dsn, "auth")
    try:
        async with db.transaction() as connection:
            await iam_store.lock_changes(connection)
            await _root(connection, project)
            admin = await _key(
                connection, project, ADMIN, kind="user", grants=ALL, node=None, secret=root_secret
            )
            node_keys = {
                node: await _key(
                    connection, project, node, kind="node", grants=[], node=node,
                    secret=root_secret,
                )
                for node in nodes
            }  # fmt: skip
    finally:
        await db.close()
    return Secrets(project, admin, node_keys)


async def _root(connection: AsyncConnection, project: str) -> None:
    root = await iam_store.root(connection)
    if root is None:
        await iam_store.add_project(
            connection, id_=project, name=project, parent=None, path=[project]
        )
    elif root != project:
        raise Conflict(f"the root project is {root}, not {project}", field="project")


async def _key(
    connection: AsyncConnection, project: str, name: str, *,
    kind: str, grants: list[str], node: str | None, secret: bytes,
) -> str:  # fmt: skip
    for key in await iam_store.keys_below(connection, project):
        if (key.project, key.name, key.kind, key.revoked) != (project, name, kind, False):
            continue
        text = tokens.derive(secret, key.principal, key.id)
        found = await iam_store.identity(connection, key.principal)
        if found and any(tokens.matches(text, stored) for stored, _ in found.keys):
            return text
        # made with another seed: it stays valid, but nobody can tell its text
    info = KeyInfo(
        id=ids.new(), principal=ids.new(), name=name, kind=kind, project=project,
        grants=grants, created_at=time.time(),
    )  # fmt: skip
    await changes.store_key(connection, info, node=node, root_secret=secret)
    return tokens.derive(secret, info.principal, info.id)


def write(made: Secrets, path: Path) -> None:
    """Writes secrets as JSON to a file of mode 0600, in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(asdict(made), file, indent=1)
        file.write("\n")
    os.replace(temporary, path)


def mint() -> tuple[str, str]:
    """``(seed, public key)`` of a new account nkey."""
    return natsjwt.mint_seed(secrets.token_bytes(SEED_BYTES))
