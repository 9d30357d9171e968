"""Each change of identity, step by step, inside the caller's transaction.

Owns: what each verb reads, has judged, and writes. Does not own: judgements
(:mod:`services.auth.rules`), the transaction and the answer (:mod:`services.auth.iam`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.iam import (
    GrantCreate,
    GrantDelete,
    IamReply,
    KeyCreate,
    KeyDelete,
    KeyInfo,
    ProjectCreate,
    ProjectDelete,
    ProjectInfo,
    QuotaCreate,
    QuotaInfo,
)  # fmt: skip
from services.auth import admission, iam_store, rules, store, tokens
from services.auth.settings import Settings
from shared import ids
from shared.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded

MAX_GRANTS = 256
_NOT_TOKEN = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class Context:
    """Who asks, in which project (``path``: ids from the root), holding what there."""

    connection: AsyncConnection
    settings: Settings
    now: float
    caller: str
    project: str
    path: tuple[str, ...]
    held: frozenset[str]
    root_secret: bytes


@dataclass(slots=True)
class Done:
    """What a change led to: the answer as it is stored (without a secret), whose
    connections are out of date, and for the record what it was about."""

    reply: IamReply
    affected: frozenset[str] = frozenset()
    target: str = ""


Change = Callable[[Context, Any], Awaitable[Done]]


async def create_project(context: Context, body: ProjectCreate) -> Done:
    """A child of the context's project."""
    connection = context.connection
    if len(context.path) >= context.settings.auth_max_depth:
        raise QuotaExceeded(
            f"at most {context.settings.auth_max_depth} levels of projects", field="project"
        )
    if body.quota is not None:
        above = await iam_store.accounts(connection, context.path)
        limits = {p: admission.limits_of(a) for p, a in above.items()}
        rules.quota_within(body.quota, limits, field="quota")
    id_ = body.id or _token(body.name)
    path = (*context.path, id_)
    made = await iam_store.add_project(
        connection, id_=id_, name=body.name, parent=context.project, path=path
    )
    if not made and body.id is None:
        id_ = f"{id_[:50].rstrip('-')}-{ids.new()[-10:]}"
        path = (*context.path, id_)
        made = await iam_store.add_project(
            connection, id_=id_, name=body.name, parent=context.project, path=path
        )
    if not made:
        raise Conflict(f"there is a project {id_} already", field="id")
    if body.quota is not None:
        await iam_store.set_quota(connection, id_, body.quota)
    info = ProjectInfo(
        id=id_, name=body.name, parent=context.project, path=list(path), created_at=context.now
    )
    affected = await iam_store.granted_above(connection, context.path)
    return Done(IamReply(project=info), affected=affected, target=id_)


def _token(name: str) -> str:
    return _NOT_TOKEN.sub("-", name.lower()).strip("-")[:63].rstrip("-") or "project"


async def delete_project(context: Context, body: ProjectDelete) -> Done:
    """An empty project, the context's own or below it."""
    connection = context.connection
    path = await _below(context, body.id, field="id")
    accounts, _ = await store.lock_accounts(connection, [body.id])
    rules.may_delete_project(
        children=await iam_store.children(connection, body.id),
        sandboxes=accounts[body.id].sandboxes,
        is_root=len(path) == 1,
    )
    affected = await iam_store.granted_above(connection, path)
    affected |= await iam_store.at_home(connection, body.id)
    await iam_store.delete_project(connection, body.id)
    return Done(IamReply(), affected=affected, target=body.id)


async def create_key(context: Context, body: KeyCreate) -> Done:
    """A new principal at home in the context's project, with one key."""
    connection = context.connection
    _few(body.grants)
    at_root = await iam_store.held(connection, context.caller, context.path[:1])
    rules.may_make_key(
        body.kind, body.node, body.grants, held=context.held, held_at_root=at_root
    )
    expires_at = rules.key_expiry(
        context.now, body.expires_in_s, giver_expires_at=await _last_end(context)
    )
    if body.node and await iam_store.node_principals(connection, body.node):
        raise Conflict(f"node {body.node} has a key already: revoke it first", field="node")
    info = KeyInfo(
        id=ids.new(), principal=ids.new(), name=body.name, kind=body.kind,
        project=context.project, grants=sorted(set(body.grants)), created_at=context.now,
        expires_at=expires_at,
    )  # fmt: skip
    await store_key(connection, info, node=body.node, root_secret=context.root_secret)
    return Done(IamReply(key=info), target=info.principal)


async def store_key(
    connection: AsyncConnection, info: KeyInfo, *, node: str | None, root_secret: bytes
) -> None:
    """Writes a principal with its key and grants."""
    await iam_store.add_principal(
        connection, id_=info.principal, kind=info.kind, name=info.name, project=info.project,
        node=node,
    )  # fmt: skip
    secret = tokens.derive(root_secret, info.principal, info.id)
    await iam_store.add_key(
        connection, id_=info.id, principal=info.principal, hash_=tokens.key_hash(secret),
        expires_at=info.expires_at,
    )  # fmt: skip
    await iam_store.give(connection, info.principal, info.project, info.grants)


async def _last_end(context: Context) -> float | None:
    """When the last of the caller's keys ends; ``None``: one never does, or the caller
    came with a token."""
    ends = await iam_store.key_ends(context.connection, context.caller)
    lasting = [e for e in ends if e is not None]
    return max(lasting) if lasting and len(lasting) == len(ends) else None


async def delete_key(context: Context, body: KeyDelete) -> Done:
    """Revokes a key of a principal at home in the context's project or below it."""
    info = await iam_store.key(context.connection, body.id)
    if info is None:
        raise NotFound(f"no key {body.id}", field="id")
    await _below(context, info.project, field="id")
    await iam_store.revoke_key(context.connection, body.id, now=context.now)
    reply = IamReply(key=msgspec.structs.replace(info, revoked=True))
    return Done(reply, affected=frozenset({info.principal}), target=info.principal)


async def create_grant(context: Context, body: GrantCreate) -> Done:
    """Gives grants in the context's project and everything below it."""
    connection = context.connection
    _few(body.grants)
    rules.may_give(context.held, body.grants)
    kind = await iam_store.principal_kind(connection, body.principal)
    if kind is None:
        raise NotFound(f"no principal {body.principal}", field="principal")
    if kind == "node":
        raise InvalidRequest("a node takes no grants", field="principal")
    await iam_store.give(connection, body.principal, context.project, body.grants)
    return await _granted(context, body.principal)


async def delete_grant(context: Context, body: GrantDelete) -> Done:
    """Takes grants back that were given in exactly the context's project."""
    taken = await iam_store.take(
        context.connection, body.principal, context.project, body.grants
    )
    missing = sorted(set(body.grants) - taken)
    if missing:
        raise NotFound(
            f"{body.principal} was not given {', '.join(missing)} in {context.project}",
            field="grants",
        )
    return await _granted(context, body.principal)


async def _granted(context: Context, principal: str) -> Done:
    held = await iam_store.held(context.connection, principal, context.path)
    reply = IamReply(principal=principal, grants=sorted(held))
    return Done(reply, affected=frozenset({principal}), target=principal)


async def create_quota(context: Context, body: QuotaCreate) -> Done:
    """Sets the limits of a project; of one's own only with the grant from above."""
    connection = context.connection
    target = body.project or context.project
    path = await _below(context, target, field="project")
    above = path[:-1]
    judged_at = above or path
    rules.may(
        await iam_store.held(connection, context.caller, judged_at),
        "quota.create", project=judged_at[-1],
    )  # fmt: skip
    accounts = await iam_store.accounts(connection, path)
    limits = {p: admission.limits_of(accounts[p]) for p in above}
    rules.quota_within(body.limits, limits, field="limits")
    await iam_store.set_quota(connection, target, body.limits)
    info = QuotaInfo(
        project=target, limit=body.limits, used=admission.used_of(accounts[target])
    )
    return Done(IamReply(quota=info), target=target)


async def _below(context: Context, project: str, *, field: str) -> tuple[str, ...]:
    path = (await store.paths(context.connection, [project])).get(project)
    if path is None or context.project not in path:
        # whether a project exists elsewhere is not told
        raise NotFound(f"no project {project} in {context.project}", field=field)
    return path


def _few(grants: Sequence[str]) -> None:
    if len(grants) > MAX_GRANTS:
        raise InvalidRequest(f"at most {MAX_GRANTS} grants", field="grants")


CHANGES: dict[str, tuple[type[Any], Change]] = {
    "project.create": (ProjectCreate, create_project),
    "project.delete": (ProjectDelete, delete_project),
    "key.create": (KeyCreate, create_key),
    "key.delete": (KeyDelete, delete_key),
    "grant.create": (GrantCreate, create_grant),
    "grant.delete": (GrantDelete, delete_grant),
    "quota.create": (QuotaCreate, create_quota),
}
"""Body and step of each verb."""
