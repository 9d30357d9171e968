"""SQL of the hot path: requests, usage, charges. One statement a batch, never one a row.

Owns: these statements. Does not own: when they run (:mod:`services.auth.handlers`,
:mod:`services.auth.releases`), identity (:mod:`services.auth.iam_store`).

Two instances never wait for each other in a circle: request rows are inserted in the
order of their ids, then usage rows are locked in the order of theirs, then charges
follow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.auth.admission import Account, Cost
from shared.db import fetch

_sql = cache(text)  # a statement is parsed once

"""Most request rows removed at a time."""


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A request as it is remembered."""

    id: str
    project: str
    principal: str
    verb: str
    sha256: bytes
    reply: bytes | None = None


@dataclass(frozen=True, slots=True)
class ChargeRow:
    """What one sandbox is charged."""

    uid: str
    project: str
    request: str
    cost: Cost


async def paths(
    connection: AsyncConnection, projects: Collection[str]
) -> dict[str, tuple[str, ...]]:
    """Ids from the root for each of ``projects`` that exists."""
    rows = await fetch(
        connection,
        _sql("select id, path from project where id = any(cast(:ids as text[]))"),
        {"ids": list(projects)},
    )
    return {row[0]: tuple(row[1]) for row in rows}


async def remember(
    connection: AsyncConnection, requests: Iterable[RequestRow]
) -> tuple[frozenset[str], dict[str, tuple[str, ...]]]:
    """Inserts requests whose project there is; returns the ids seen for the first time,
    and the path (ids from the root) of each project. Waits for another instance that
    is inserting the same request."""
    rows = sorted(requests, key=lambda r: r.id)
    if not rows:
        return frozenset(), {}
    found = await fetch(
        connection,
        _sql(
            "with new as (insert into request (id, project, principal, verb, sha256) "
            "select a.* from unnest(cast(:i as text[]), cast(:p as text[]), "
            "cast(:w as text[]), cast(:v as text[]), cast(:s as bytea[])) "
            "as a(id, project, principal, verb, sha256) "
            "join project p on p.id = a.project order by a.id "
            "on conflict do nothing returning id) "
            "select id, cast(null as text[]) from new union all "
            "select id, path from project where id = any(cast(:p as text[]))"
        ),
        {
            "i": [r.id for r in rows],
            "p": [r.project for r in rows],
            "w": [r.principal for r in rows],
            "v": [r.verb for r in rows],
            "s": [r.sha256 for r in rows],
        },
    )
    new = frozenset(row[0] for row in found if row[1] is None)
    return new, {row[0]: tuple(row[1]) for row in found if row[1] is not None}


async def remembered(
    connection: AsyncConnection, request_ids: Collection[str]
) -> dict[str, RequestRow]:
    """Requests by id."""
    if not request_ids:
        return {}
    rows = await fetch(
        connection,
        _sql(
            "select id, project, principal, verb, sha256, reply from request "
            "where id = any(cast(:ids as text[]))"
        ),
        {"ids": list(request_ids)},
    )
    return {r[0]: RequestRow(r[0], r[1], r[2], r[3], bytes(r[4]), r[5]) for r in rows}


async def set_replies(connection: AsyncConnection, replies: dict[str, bytes]) -> None:
    """Stores what a repeated request is to be told."""
    if not replies:
        return
    await fetch(
        connection,
        _sql(
            "update request set reply = new.reply from unnest(cast(:i as text[]), "
            "cast(:r as bytea[])) as new(id, reply) where request.id = new.id"
        ),
        {"i": list(replies), "r": list(replies.values())},
    )


async def lock_accounts(
    connection: AsyncConnection, projects: Collection[str]
) -> tuple[dict[str, Account], float]:
    """Use and limits of ``projects``, locked until the transaction ends, and the
    database's time in seconds since the epoch (one clock for all instances)."""
    rows = await fetch(
        connection,
        _sql(
            "select u.project, q.sandboxes, q.millicores, q.memory_mb, q.creations_per_s, "
            "u.sandboxes, u.millicores, u.memory_mb, u.tokens, u.tokens_at, "
            "extract(epoch from clock_timestamp())::double precision "
            "from usage u left join quota q on q.project = u.project "
            "where u.project = any(cast(:ids as text[])) order by u.project for update of u"
        ),
        {"ids": list(projects)},
    )
    accounts, now = {}, 0.0
    for row in rows:
        accounts[row[0]] = Account(*row[:10])
        now = max(now, row[10])
    return accounts, now


_SAVE = (
    "update usage u set sandboxes = u.sandboxes + n.s, millicores = u.millicores + n.c, "
    "memory_mb = u.memory_mb + n.m, tokens = n.t, tokens_at = n.ta "
    "from unnest(cast(:ap as text[]), cast(:as as bigint[]), cast(:ac as bigint[]), "
    "cast(:am as bigint[]), cast(:at as double precision[]), "
    "cast(:ata as double precision[])) as n(p, s, c, m, t, ta) where u.project = n.p"
)


def _saved(accounts: Iterable[Account]) -> dict[str, list[Any]]:
    """Parameters of ``_SAVE``; what was added counts as saved from here on."""
    rows = [a for a in accounts if a.added != [0, 0, 0] or a.rate is not None]
    added = [a.added for a in rows]
    for account in rows:
        account.added = [0, 0, 0]
    return {
        "ap": [a.project for a in rows],
        "as": [a[0] for a in added],
        "ac": [a[1] for a in added],
        "am": [a[2] for a in added],
        "at": [a.tokens for a in rows],
        "ata": [a.tokens_at for a in rows],
    }


async def save_accounts(connection: AsyncConnection, accounts: Iterable[Account]) -> None:
    """Adds what a batch added, and stores the buckets."""
    await fetch(connection, _sql(_SAVE), _saved(accounts))


Owned = frozenset[tuple[str, str]]
"""Pairs of uid and request."""


async def charge(
    connection: AsyncConnection, rows: Sequence[ChargeRow], accounts: Sequence[Account]
) -> Owned:
    """Inserts charges and saves the accounts that they were added to; returns those of
    ``rows`` whose uid is another request's already: they are not inserted, and the
    caller has to give them back."""
    parameters = {
        "u": [r.uid for r in rows],
        "p": [r.project for r in rows],
        "r": [r.request for r in rows],
        "c": [r.cost.millicores for r in rows],
        "m": [r.cost.memory_mb for r in rows],
    }
    counted = await fetch(
        connection,
        _sql(
            "with saved as (" + _SAVE + "), "
            "new as (insert into charge (uid, project, request, millicores, memory_mb) "
            "select * from unnest(cast(:u as text[]), cast(:p as text[]), cast(:r as text[]), "
            "cast(:c as bigint[]), cast(:m as bigint[])) on conflict do nothing returning 1) "
            "select count(*) from new"
        ),
        parameters | _saved(accounts),
    )
    inserted = counted[0][0]
    return frozenset() if inserted == len(rows) else await _taken(connection, rows)


async def _taken(connection: AsyncConnection, rows: Sequence[ChargeRow]) -> Owned:
    found = await fetch(
        connection,
        _sql("select uid, request from charge where uid = any(cast(:u as text[]))"),
        {"u": [r.uid for r in rows]},
    )
    owners = {row[0]: row[1] for row in found}
    return frozenset((r.uid, r.request) for r in rows if owners[r.uid] != r.request)


async def release(
    connection: AsyncConnection, uids: Collection[str]
) -> list[tuple[str, int, int, int]]:
    """Removes charges; returns project, sandboxes, thousandths of a core and MiB of
    what was removed now: a charge that is gone already gives nothing back."""
    rows = await fetch(
        connection,
        _sql(
            "with gone as (delete from charge where uid = any(cast(:u as text[])) "
            "returning project, millicores, memory_mb) "
            "select project, count(*), sum(millicores)::bigint, sum(memory_mb)::bigint "
            "from gone group by project"
        ),
        {"u": list(uids)},
    )
    return [(r[0], r[1], r[2], r[3]) for r in rows]


async def old_charges(
    connection: AsyncConnection, *, after: str, age_s: float, limit: int
) -> list[tuple[str, str, float]]:
    """Uid, project and age in seconds of charges older than ``age_s``, by uid, from
    the one after ``after`` on."""
    rows = await fetch(
        connection,
        _sql(
            "select uid, project, extract(epoch from now() - at)::double precision "
            "from charge where uid > :after and at < now() - make_interval(secs => :age) "
            "order by uid limit :n"
        ),
        {"after": after, "age": age_s, "n": limit},
    )
    return [(row[0], row[1], row[2]) for row in rows]


async def prune_requests(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Forgets old requests of which nothing is charged, at most ``limit``; returns how
    many."""
    result = await fetch(
        connection,
        _sql(
            "delete from request where id in (select id from request r "
            "where at < now() - make_interval(secs => :keep) "
            "and not exists (select 1 from charge c where c.request = r.id) "
            "order by at limit :n for update skip locked) returning id"
        ),
        {"keep": keep_s, "n": limit},
    )
    return len(result)
