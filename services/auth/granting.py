"""What the specs of a create may ask for beyond a sandbox: routes, secrets, named policies.

Owns: refusing single specs for it, working named policies in. Does not own: what a good
spec is (:mod:`services.auth.validate`), what a secret is bound to
(:mod:`services.auth.bindings`), quotas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from services.auth import bindings, iam_store, named, rules, secret_store
from services.auth.creates import Create
from services.auth.delegation import ROUTE, uncovered
from shared.errors import DsecError, Forbidden
from shared.wire import to_wire

USE_SECRETS = "secret.use"


async def judge(connection: AsyncConnection, create: Create, path: Sequence[str]) -> None:
    """Refuses the specs whose routes or secrets their asker may not give to a sandbox, or
    whose policy's name means nothing. ``path``: the create's project, from the root on."""
    if any(spec.routes or spec.secrets for spec in create.specs):
        held = await iam_store.held(connection, create.principal, path)
        _judge_routes(create, held)
        await _judge_secrets(connection, create, held)
    await _name_policies(connection, create, path)


def _judge_routes(create: Create, held: Collection[str]) -> None:
    for index, spec in enumerate(create.specs):
        if missing := uncovered(held, [f"{ROUTE}.{name}" for name in spec.routes]):
            text = f"{', '.join(missing)} is not held in project {create.project}"
            create.deny(index, to_wire(Forbidden(text, field="routes")))


async def _judge_secrets(
    connection: AsyncConnection, create: Create, held: Collection[str]
) -> None:
    specs = [(i, s) for i, s in enumerate(create.specs) if s.secrets]
    if not specs:
        return
    names = {name for _, spec in specs for name in spec.secrets}
    rows = await secret_store.find(connection, create.project, names)
    known = {name: row.info for name, row in rows.items()}
    for index, spec in specs:
        try:
            rules.may(held, USE_SECRETS, project=create.project)
            bindings.judge(spec, known)
        except DsecError as exc:
            create.deny(index, to_wire(exc))


async def _name_policies(connection: AsyncConnection, create: Create, path: Sequence[str]) -> None:
    for index, spec in enumerate(create.specs):
        if spec.policy_name is None:
            continue
        try:
            found = await named.find(connection, path, spec.policy_name)
            create.replace(index, named.applied(spec, found))
        except DsecError as exc:
            create.deny(index, to_wire(exc))
