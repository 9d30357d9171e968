"""SQL of identity: projects, principals, keys, grants, quotas.

Owns: these statements. Does not own: judgements (:mod:`services.auth.rules`), the hot
path's SQL (:mod:`services.auth.store`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.iam import KeyInfo, Limits, ProjectInfo
from services.auth.admission import MILLI, Account

CHANGES_LOCK = 0x69616D
"""Changes of identity are rare and judged against each other: one at a time."""
MAX_LISTED = 10_000
"""Rows in one answer."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a credential stands for. ``scopes``: grants by project of each subtree they
    cover (``*``: granted at the root). ``keys``: hash and end of each live key."""

    principal: str
    kind: str
    node: str | None
    home: str
    scopes: dict[str, list[str]]
    keys: tuple[tuple[bytes, float | None], ...] = ()


_IDENTITY = text(
    "select p.kind, p.node, p.project, "
    "array(select k.hash from api_key k where k.principal = p.id and k.revoked_at is null), "
    "array(select coalesce(k.expires_at, 'infinity') from api_key k "
    "      where k.principal = p.id and k.revoked_at is null), "
    "array(select distinct case when r.parent is null then '*' else d.id end || ' ' || g.verb "
    "      from access_grant g join project r on r.id = g.project "
    "      left join project d on r.parent is not null and d.path @> array[g.project] "
    "      where g.principal = p.id) "
    "from principal p where p.id = :id"
)


async def identity(connection: AsyncConnection, principal: str) -> Identity | None:
    """All that a connect needs, in one statement; ``None`` for a stranger."""
    row = (await connection.execute(_IDENTITY, {"id": principal})).first()
    if row is None:
        return None
    scopes: dict[str, list[str]] = {}
    for entry in row[5]:
        project, _, verb = entry.partition(" ")
        scopes.setdefault(project, []).append(verb)
    ends = [None if math.isinf(end) else end for end in row[4]]
    keys = tuple(zip((bytes(h) for h in row[3]), ends, strict=True))
    return Identity(principal, row[0], row[1], row[2], scopes, keys)


async def lock_changes(connection: AsyncConnection) -> None:
    """Waits until no other change of identity is under way."""
    await connection.execute(text("select pg_advisory_xact_lock(:k)"), {"k": CHANGES_LOCK})


async def held(
    connection: AsyncConnection, principal: str, path: Sequence[str]
) -> frozenset[str]:
    """What ``principal`` holds in the project with this path: nothing once all its keys
    are revoked, though its connection may live for a moment more."""
    rows = await connection.execute(
        text(
            "select verb from access_grant where principal = :w "
            "and project = any(cast(:p as text[])) and coalesce((select "
            "bool_or(revoked_at is null) from api_key where principal = :w), true)"
        ),
        {"w": principal, "p": list(path)},
    )
    return frozenset(row[0] for row in rows)


async def add_project(
    connection: AsyncConnection, *, id_: str, name: str, parent: str | None, path: Sequence[str]
) -> bool:
    """Makes a project and its usage row; ``False`` where the id is taken."""
    result = await connection.execute(
        text(
            "insert into project (id, name, parent, path) "
            "values (:i, :n, :p, cast(:path as text[])) on conflict do nothing"
        ),
        {"i": id_, "n": name, "p": parent, "path": list(path)},
    )
    if result.rowcount == 0:
        return False
    await connection.execute(text("insert into usage (project) values (:i)"), {"i": id_})
    return True


async def projects_below(connection: AsyncConnection, project: str) -> list[ProjectInfo]:
    """A project and everything below it, by path."""
    rows = await connection.execute(
        text(
            "select id, name, parent, path, extract(epoch from created_at)::double precision "
            "from project where path @> array[cast(:p as text)] order by path limit :n"
        ),
        {"p": project, "n": MAX_LISTED},
    )
    return [
        ProjectInfo(id=r[0], name=r[1], parent=r[2], path=list(r[3]), created_at=r[4])
        for r in rows
    ]


async def children(connection: AsyncConnection, project: str) -> int:
    """How many projects are right below one."""
    query = text("select count(*) from project where parent = :p")
    return int((await connection.execute(query, {"p": project})).scalar_one())


async def delete_project(connection: AsyncConnection, project: str) -> None:
    """Removes a project with its principals, keys, grants, quota and usage."""
    for statement in (
        "delete from principal where project = :p",
        "delete from project where id = :p",
    ):
        await connection.execute(text(statement), {"p": project})


async def add_principal(
    connection: AsyncConnection, *, id_: str, kind: str, name: str, project: str, node: str | None
) -> None:
    """Makes a principal, if it is not there."""
    await connection.execute(
        text(
            "insert into principal (id, kind, name, project, node) "
            "values (:i, :k, :n, :p, :node) on conflict do nothing"
        ),
        {"i": id_, "k": kind, "n": name, "p": project, "node": node},
    )


async def add_key(
    connection: AsyncConnection, *, id_: str, principal: str, hash_: bytes,
    expires_at: float | None,
) -> None:  # fmt: skip
    """Stores a key's hash."""
    await connection.execute(
        text("insert into api_key (id, principal, hash, expires_at) values (:i, :w, :h, :e)"),
        {"i": id_, "w": principal, "h": hash_, "e": expires_at},
    )


async def revoke_key(connection: AsyncConnection, key: str, *, now: float) -> None:
    """Ends a key."""
    query = text("update api_key set revoked_at = :n where id = :i and revoked_at is null")
    await connection.execute(query, {"i": key, "n": now})


_KEYS = (
    "select k.id, p.id, p.name, p.kind, p.project, "
    "array(select g.verb from access_grant g where g.principal = p.id "
    "      and g.project = p.project order by g.verb), "
    "extract(epoch from k.created_at)::double precision, k.expires_at, "
    "k.revoked_at is not null "
    "from api_key k join principal p on p.id = k.principal join project r on r.id = p.project "
)


def _key_info(row: Any) -> KeyInfo:
    return KeyInfo(
        id=row[0], principal=row[1], name=row[2], kind=row[3], project=row[4],
        grants=list(row[5]), created_at=row[6], expires_at=row[7], revoked=row[8],
    )  # fmt: skip


async def keys_below(
    connection: AsyncConnection, project: str, principal: str | None = None
) -> list[KeyInfo]:
    """Keys of the principals at home in a project or below it, newest first."""
    rows = await connection.execute(
        text(
            _KEYS + "where r.path @> array[cast(:p as text)] "
            "and (cast(:w as text) is null or p.id = :w) order by k.created_at desc limit :n"
        ),
        {"p": project, "w": principal, "n": MAX_LISTED},
    )
    return [_key_info(row) for row in rows]


async def key(connection: AsyncConnection, key_id: str) -> KeyInfo | None:
    """One key."""
    row = (await connection.execute(text(_KEYS + "where k.id = :i"), {"i": key_id})).first()
    return _key_info(row) if row else None


async def key_ends(connection: AsyncConnection, principal: str) -> list[float | None]:
    """When each live key of a principal ends (``None``: never)."""
    query = text("select expires_at from api_key where principal = :w and revoked_at is null")
    return [row[0] for row in await connection.execute(query, {"w": principal})]


async def principal_kind(connection: AsyncConnection, principal: str) -> str | None:
    """A principal's kind, ``None`` for a stranger."""
    query = text("select kind from principal where id = :w")
    return (await connection.execute(query, {"w": principal})).scalar()


async def node_principals(connection: AsyncConnection, node: str) -> int:
    """How many principals with a live key speak for ``node``."""
    query = text(
        "select count(*) from principal p join api_key k on k.principal = p.id "
        "where p.node = :n and k.revoked_at is null"
    )
    return int((await connection.execute(query, {"n": node})).scalar_one())


async def give(
    connection: AsyncConnection, principal: str, project: str, verbs: Iterable[str]
) -> None:
    """Adds grants; those already there stay."""
    await connection.execute(
        text(
            "insert into access_grant (principal, project, verb) "
            "select :w, :p, unnest(cast(:v as text[])) on conflict do nothing"
        ),
        {"w": principal, "p": project, "v": sorted(set(verbs))},
    )


async def take(
    connection: AsyncConnection, principal: str, project: str, verbs: Collection[str]
) -> frozenset[str]:
    """Removes grants given in exactly this project; returns those that were there."""
    rows = await connection.execute(
        text(
            "delete from access_grant where principal = :w and project = :p "
            "and verb = any(cast(:v as text[])) and source = 'given' returning verb"
        ),
        {"w": principal, "p": project, "v": list(verbs)},
    )
    return frozenset(row[0] for row in rows)


Pairs = frozenset[tuple[str, str]]
"""Grants as project and verb."""


async def existing(connection: AsyncConnection, grants: Mapping[str, Collection[str]]) -> Pairs:
    """Those of ``grants`` (verbs by project) whose project there is."""
    known = await connection.execute(
        text("select id from project where id = any(cast(:p as text[]))"), {"p": list(grants)}
    )
    return frozenset((row[0], verb) for row in known for verb in grants[row[0]])


async def claimed(connection: AsyncConnection, principal: str) -> Pairs:
    """What a principal's last token said."""
    rows = await connection.execute(
        text("select project, verb from access_grant where principal = :w and source = 'oidc'"),
        {"w": principal},
    )
    return frozenset((row[0], row[1]) for row in rows)


async def claim(connection: AsyncConnection, principal: str, pairs: Pairs) -> None:
    """Makes a token's claims the principal's grants of that source, exactly."""
    await connection.execute(
        text("delete from access_grant where principal = :w and source = 'oidc'"),
        {"w": principal},
    )
    rows = sorted(pairs)
    await connection.execute(
        text(
            "insert into access_grant (principal, project, verb, source) "
            "select :w, p, v, 'oidc' from unnest(cast(:p as text[]), cast(:v as text[])) "
            "as n(p, v) on conflict do nothing"
        ),
        {"w": principal, "p": [r[0] for r in rows], "v": [r[1] for r in rows]},
    )


async def granted_above(connection: AsyncConnection, path: Sequence[str]) -> frozenset[str]:
    """Principals whose permissions list projects below ``path``: those with grants
    along it, but for the root, whose grants need no list."""
    rows = await connection.execute(
        text(
            "select distinct principal from access_grant where project = any(cast(:p as text[]))"
        ),
        {"p": list(path[1:])},
    )
    return frozenset(row[0] for row in rows)


async def at_home(connection: AsyncConnection, project: str) -> frozenset[str]:
    """Principals whose home a project is."""
    query = text("select id from principal where project = :p")
    return frozenset(row[0] for row in await connection.execute(query, {"p": project}))


async def set_quota(connection: AsyncConnection, project: str, limits: Limits) -> None:
    """Replaces a project's own limits."""
    await connection.execute(
        text(
            "insert into quota (project, sandboxes, millicores, memory_mb, creations_per_s) "
            "values (:p, :s, :c, :m, :r) on conflict (project) do update set "
            "sandboxes = excluded.sandboxes, millicores = excluded.millicores, "
            "memory_mb = excluded.memory_mb, creations_per_s = excluded.creations_per_s"
        ),
        {
            "p": project,
            "s": limits.sandboxes,
            "c": None if limits.cores is None else round(limits.cores * MILLI),
            "m": limits.memory_mb,
            "r": limits.creations_per_s,
        },
    )


async def accounts(
    connection: AsyncConnection, projects: Collection[str]
) -> dict[str, Account]:
    """Limits and use of ``projects``, not locked."""
    rows = await connection.execute(
        text(
            "select u.project, q.sandboxes, q.millicores, q.memory_mb, q.creations_per_s, "
            "u.sandboxes, u.millicores, u.memory_mb from usage u "
            "left join quota q on q.project = u.project "
            "where u.project = any(cast(:ids as text[]))"
        ),
        {"ids": list(projects)},
    )
    return {row[0]: Account(*row) for row in rows}


async def root(connection: AsyncConnection) -> str | None:
    """The root project's id."""
    query = text("select id from project where parent is null")
    return (await connection.execute(query)).scalar()
