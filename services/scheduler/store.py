"""All SQL on sandboxes, their requests, specs, transitions and operations.

Owns: statements, each for a whole batch (arrays, ``unnest``). Does not own: nodes
(``nodes``), the order of a transaction (``work``) or any decision.

Locks are taken in one order everywhere: sandboxes by uid, then nodes by id, then
operations by id. A deadlock that another client causes is retried as an outage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import WireError, decode
from schemas.sandbox import CreateCommand, ItemResult, SandboxInfo, SandboxQuery, SandboxSpec
from services.scheduler.model import Sandbox, Step, json_text
from services.scheduler.sending import SpecKey
from shared.errors import Unavailable

_SELECT = """
    select s.uid, s.project, s.state, s.generation, s.placed_generation, s.node, s.request_id,
        s.index, s.spec_idx, s.principal, s.backend, s.cores, s.memory_mb, s.job,
        s.labels::text as labels, s.cause, s.is_infra, s.message, s.error::text as error,
        s.enforcement::text as enforcement, s.tried_nodes, s.op_id,
        extract(epoch from s.expires_at)::float8 as expires_at,
        extract(epoch from s.deadline_at)::float8 as deadline_at,
        extract(epoch from s.created_at)::float8 as created_at,
        extract(epoch from s.running_at)::float8 as running_at,
        extract(epoch from s.changed_at)::float8 as changed_at,
        r.reply_to, coalesce(r.total, 1) as total, r.trace
    from sandbox s left join request r on r.request_id = s.request_id
"""
ON_NODE = "('placed', 'starting', 'running', 'pausing', 'paused', 'resuming', 'stopping')"
LIVE = f"(s.state in {ON_NODE} or s.state = 'requested')"


def _sandbox(row: Any) -> Sandbox:
    values = dict(row._mapping)
    labels, error = values["labels"], values["error"]
    tried, enforcement = values.pop("tried_nodes"), values["enforcement"]
    values["labels"] = json.loads(labels) if labels != "{}" else {}
    values["error"] = decode(error.encode(), WireError) if error else None
    values["enforcement"] = json.loads(enforcement) if enforcement else {}
    return Sandbox(tried=tuple(tried.split(",")) if tried else (), **values)


async def _all(connection: AsyncConnection, sql: TextClause, **parameters: Any) -> list[Any]:
    return list(await connection.execute(sql, parameters))


_LOCK = text(_SELECT + "where s.uid = any(cast(:uids as text[])) order by s.uid for update of s")
_FIND = text(_SELECT + "where s.uid = any(cast(:uids as text[]))")


async def lock(connection: AsyncConnection, uids: Iterable[str]) -> list[Sandbox]:
    """The rows of ``uids``, locked; unknown ones are absent."""
    return [_sandbox(r) for r in await _all(connection, _LOCK, uids=sorted(set(uids)))]


async def find(connection: AsyncConnection, uids: Iterable[str]) -> list[Sandbox]:
    """The rows of ``uids``, not locked."""
    return [_sandbox(r) for r in await _all(connection, _FIND, uids=list(uids))]


_OVERDUE = text(
    _SELECT + "where s.deadline_at < to_timestamp(:now) "
    "order by s.uid limit :n for update of s skip locked"
)
_ON_GONE_NODES = text(
    _SELECT + f"where s.state in {ON_NODE} and s.node in (select id from node "
    "where lost_at < to_timestamp(:before)) order by s.uid limit :n for update of s skip locked"
)
_ON_DRAINING = text(
    _SELECT + f"where s.state in {ON_NODE} and s.state <> 'stopping' and s.node in "
    "(select id from node where admin = 'draining') "
    "order by s.uid limit :n for update of s skip locked"
)


async def lock_overdue(connection: AsyncConnection, now: float, limit: int) -> list[Sandbox]:
    """A portion of the rows whose deadline has passed, locked; rows that another
    scheduler works on are left to it."""
    return [_sandbox(r) for r in await _all(connection, _OVERDUE, now=now, n=limit)]


async def lock_on_gone_nodes(
    connection: AsyncConnection, before: float, limit: int
) -> list[Sandbox]:
    """A portion of the sandboxes of nodes lost before ``before``, locked."""
    return [_sandbox(r) for r in await _all(connection, _ON_GONE_NODES, before=before, n=limit)]


async def lock_on_draining(connection: AsyncConnection, limit: int) -> list[Sandbox]:
    """A portion of the sandboxes that draining nodes still run, locked."""
    return [_sandbox(r) for r in await _all(connection, _ON_DRAINING, n=limit)]


def _arrays(columns: Mapping[str, str], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: [row[name] for row in rows] for name in columns}


def _unnest(columns: Mapping[str, str]) -> str:
    arrays = ", ".join(f"cast(:{name} as {kind}[])" for name, kind in columns.items())
    names = ", ".join(f'"{name}"' for name in columns)
    return f"unnest({arrays}) as n({names})"


_CHANGING = {
    "uid": "text", "state": "text", "generation": "bigint", "placed_generation": "bigint",
    "node": "text", "cause": "text", "is_infra": "boolean", "message": "text", "error": "text",
    "enforcement": "text", "tried_nodes": "text", "op_id": "text", "deadline_at": "float8",
    "running_at": "float8", "changed_at": "float8",
}  # fmt: skip
_FIXED = {
    "project": "text", "request_id": "text", "index": "int", "spec_idx": "int",
    "principal": "text", "backend": "text", "cores": "float8", "memory_mb": "bigint",
    "job": "text", "labels": "text", "expires_at": "float8", "created_at": "float8",
}  # fmt: skip
_AS = {
    "labels": "n.labels::jsonb", "error": "n.error::jsonb",
    "enforcement": "n.enforcement::jsonb",
    **{c: f"to_timestamp(n.{c})" for c in
       ("deadline_at", "running_at", "changed_at", "expires_at", "created_at")},
}  # fmt: skip


def _as(column: str) -> str:
    return _AS.get(column, f'n."{column}"')


def _values(row: Sandbox) -> dict[str, Any]:
    return {
        "uid": row.uid, "state": row.state, "generation": row.generation,
        "placed_generation": row.placed_generation, "node": row.node, "cause": row.cause,
        "is_infra": row.is_infra, "message": row.message.replace("\x00", ""),
        "error": json_text(row.error) if row.error else None,
        "enforcement": json_text(row.enforcement) if row.enforcement else None,
        "tried_nodes": ",".join(row.tried), "op_id": row.op_id, "deadline_at": row.deadline_at,
        "running_at": row.running_at, "changed_at": row.changed_at, "project": row.project,
        "request_id": row.request_id, "index": row.index, "spec_idx": row.spec_idx,
        "principal": row.principal, "backend": row.backend, "cores": row.cores,
        "memory_mb": row.memory_mb, "job": row.job,
        "labels": json_text(row.labels) if row.labels else "{}",
        "expires_at": row.expires_at, "created_at": row.created_at,
    }  # fmt: skip


_INSERTED = {**_CHANGING, **_FIXED}
_QUOTED = ", ".join(f'"{c}"' for c in _INSERTED)
_INSERT = text(
    f"insert into sandbox ({_QUOTED}) "
    f"select {', '.join(_as(c) for c in _INSERTED)} from {_unnest(_INSERTED)} "
    "on conflict (uid) do nothing returning uid"
)
_WAS = {"was_state": "text", "was_generation": "bigint"}
_UPDATE = text(
    "update sandbox s set "
    + ", ".join(f"{c} = {_as(c)}" for c in _CHANGING if c != "uid")
    + f" from {_unnest({**_CHANGING, **_WAS})} where s.uid = n.uid "
    "and s.state = n.was_state and s.generation = n.was_generation"
)


async def insert(connection: AsyncConnection, rows: Sequence[Sandbox]) -> set[str]:
    """Inserts new rows; returns the uids that did not exist yet."""
    if not rows:
        return set()
    ordered = [_values(r) for r in sorted(rows, key=lambda r: r.uid)]
    return {r[0] for r in await _all(connection, _INSERT, **_arrays(_INSERTED, ordered))}


async def update(
    connection: AsyncConnection, rows: Sequence[Sandbox], was: Mapping[str, Sandbox]
) -> None:
    """Writes locked rows back, each by compare-and-swap of state and generation.
    Raises ``Unavailable`` (the batch comes again) where one was changed meanwhile."""
    if not rows:
        return
    values = [
        _values(r) | {"was_state": was[r.uid].state, "was_generation": was[r.uid].generation}
        for r in rows
    ]
    result = await connection.execute(_UPDATE, _arrays({**_CHANGING, **_WAS}, values))
    if result.rowcount != len(rows):
        raise Unavailable(f"{len(rows) - result.rowcount} sandboxes changed meanwhile")


_STEP = {
    "uid": "text", "generation": "bigint", "source": "text", "target": "text", "event": "text",
    "by": "text", "cause": "text", "at": "float8",
}  # fmt: skip
_INSERT_STEPS = text(
    f"insert into transition ({', '.join(_STEP)}) "
    "select uid, generation, source, target, event, by, cause, to_timestamp(at) "
    f"from {_unnest(_STEP)}"
)


async def insert_steps(connection: AsyncConnection, steps: Sequence[Step]) -> None:
    """Appends to the history."""
    if steps:
        arrays = {name: [getattr(s, name) for s in steps] for name in _STEP}
        await connection.execute(_INSERT_STEPS, arrays)


_INSERT_REQUESTS = text(
    "insert into request (request_id, project, principal, reply_to, total, trace, projects) "
    "select i, p, w, r, t, c, j::jsonb from unnest(cast(:i as text[]), cast(:p as text[]), "
    "cast(:w as text[]), cast(:r as text[]), cast(:t as int[]), cast(:c as text[]), "
    "cast(:j as text[])) as n(i, p, w, r, t, c, j) order by i "
    "on conflict (request_id) do update set reply_to = excluded.reply_to "
    "where request.project = excluded.project "
    "and request.reply_to is distinct from excluded.reply_to"
)


async def put_requests(connection: AsyncConnection, commands: Sequence[CreateCommand]) -> None:
    """Stores what a request's sandboxes share; a repeated one brings its new reply
    subject."""
    last = {c.request_id: c for c in commands}.values()
    parameters = {
        "i": [c.request_id for c in last],
        "p": [c.project for c in last],
        "w": [c.principal for c in last],
        "r": [c.reply_to for c in last],
        "t": [c.total for c in last],
        "c": [c.trace for c in last],
        "j": [json_text(c.projects or [c.project]) for c in last],
    }
    await connection.execute(_INSERT_REQUESTS, parameters)


_PUT_SPECS = text(
    "insert into spec (request_id, idx, resolved, body) select r, i, s, b from "
    "unnest(cast(:r as text[]), cast(:i as int[]), cast(:s as boolean[]), cast(:b as bytea[])) "
    "as n(r, i, s, b) order by r, i "
    "on conflict (request_id, idx) do update set resolved = true, body = excluded.body "
    "where not spec.resolved and excluded.resolved"
)


async def put_specs(
    connection: AsyncConnection, specs: Mapping[SpecKey, tuple[bytes, bool]]
) -> None:
    """Stores encoded ``ResolvedSpec``s, with whether their images are resolved."""
    if specs:
        parameters = {
            "r": [r for r, _ in specs],
            "i": [i for _, i in specs],
            "s": [done for _, done in specs.values()],
            "b": [body for body, _ in specs.values()],
        }
        await connection.execute(_PUT_SPECS, parameters)


_SPECS = text(
    "select s.request_id, s.idx, s.body, s.resolved, r.projects::text from spec s "
    "join request r using (request_id) join unnest(cast(:r as text[]), cast(:i as int[])) "
    "as n(r, i) on s.request_id = n.r and s.idx = n.i"
)


async def specs(
    connection: AsyncConnection, keys: Iterable[SpecKey]
) -> dict[SpecKey, tuple[bytes, bool, list[str]]]:
    """Encoded specs, whether they are resolved, and the projects whose images they
    see."""
    wanted = list(set(keys))
    if not wanted:
        return {}
    parameters = {"r": [k[0] for k in wanted], "i": [k[1] for k in wanted]}
    rows = await _all(connection, _SPECS, **parameters)
    return {(r, i): (bytes(body), done, json.loads(p)) for r, i, body, done, p in rows}


_TOMBSTONES = text(
    "insert into sandbox (uid, project, state, generation, placed_generation, index, spec_idx, "
    "principal, backend, cores, memory_mb, labels, cause, is_infra, message, tried_nodes, "
    "expires_at, created_at, changed_at) "
    "select u, p, 'stopped', 0, 0, 0, -1, w, 'container', 0, 0, '{}', 'cancelled', false, "
    "'stopped before it was created', '', now(), now(), now() "
    "from unnest(cast(:u as text[]), cast(:p as text[]), cast(:w as text[])) as n(u, p, w) "
    "order by u on conflict (uid) do nothing returning uid"
)
_ADOPT = text(
    "update sandbox s set request_id = n.request_id, index = n.index, spec_idx = n.spec_idx, "
    "principal = n.principal, backend = n.backend, job = n.job, labels = n.labels::jsonb "
    f"from {_unnest({'uid': 'text', **_FIXED})} "
    "where s.uid = n.uid and s.project = n.project and s.request_id is null"
)


async def put_tombstones(
    connection: AsyncConnection, stops: Sequence[tuple[str, str, str]]
) -> None:
    """Remembers stops (uid, project, principal) of sandboxes not yet created, so
    that a create that comes later starts nothing. Raises ``Unavailable`` where one
    was created meanwhile."""
    unique = {uid: (uid, project, principal) for uid, project, principal in stops}.values()
    parameters = {k: [s[i] for s in unique] for i, k in enumerate("upw")}
    if len(await _all(connection, _TOMBSTONES, **parameters)) != len(unique):
        raise Unavailable("a sandbox was created while it was stopped")


async def adopt(connection: AsyncConnection, rows: Sequence[Sandbox]) -> None:
    """Completes the rows of stops that came before their create."""
    if rows:
        values = [_values(r) for r in sorted(rows, key=lambda r: r.uid)]
        await connection.execute(_ADOPT, _arrays({"uid": "text", **_FIXED}, values))


_PUT_OP = text(
    "insert into op (request_id, reply_to, uids, settled, remaining) "
    "values (:id, :reply_to, cast(:uids as text[]), :settled, :remaining) "
    "on conflict (request_id) do update set reply_to = excluded.reply_to, "
    "settled = excluded.settled, remaining = excluded.remaining"
)
_SETTLE_OPS = text(
    "with n as (select * from unnest(cast(:ids as text[]), cast(:counts as int[])) "
    "as n(id, done)), l as (select request_id from op where request_id in (select id from n) "
    "order by request_id for update) "
    "update op set remaining = op.remaining - n.done from n, l "
    "where op.request_id = n.id and l.request_id = n.id "
    "returning op.request_id, op.reply_to, op.uids, op.settled, op.remaining"
)
_DELETE_OPS = text("delete from op where request_id = any(cast(:ids as text[]))")
_FORGET_OPS = text("delete from op where at < now() - make_interval(secs => :keep)")
_results = msgspec.json.Decoder(list[ItemResult])


async def put_op(
    connection: AsyncConnection, request_id: str, reply_to: str | None, *,
    uids: Sequence[str], settled: Sequence[ItemResult], remaining: int,
) -> None:  # fmt: skip
    """Remembers an operation that waits for sandboxes. The caller holds their locks,
    so that ``remaining`` is exact also when the operation comes again."""
    await connection.execute(
        _PUT_OP,
        {
            "id": request_id, "reply_to": reply_to, "uids": list(uids), "remaining": remaining,
            "settled": json_text(settled).encode(),
        },
    )  # fmt: skip


async def settle_ops(
    connection: AsyncConnection, counts: Mapping[str, int]
) -> list[tuple[str, str | None, list[str], list[ItemResult]]]:
    """Counts settled sandboxes; returns and deletes the operations that are
    complete: request id, reply subject, uids, results known from the start."""
    if not counts:
        return []
    ids = sorted(counts)
    rows = await _all(connection, _SETTLE_OPS, ids=ids, counts=[counts[i] for i in ids])
    done = [r for r in rows if r[4] <= 0]
    if done:
        await connection.execute(_DELETE_OPS, {"ids": [r[0] for r in done]})
    return [(r[0], r[1], r[2], _results.decode(r[3])) for r in done]


async def forget_ops(connection: AsyncConnection, keep_s: float) -> None:
    """Removes operations that nobody completed."""
    await connection.execute(_FORGET_OPS, {"keep": keep_s})


_SELECTED = text(
    f"select s.uid from sandbox s where s.project = :project and {LIVE} "
    "and (cast(:job as text) is null or s.job = :job) "
    "and (cast(:labels as text) is null or s.labels @> cast(:labels as jsonb)) limit :n"
)


async def select_live(
    connection: AsyncConnection, project: str, *, job: str | None, labels: Mapping[str, str],
    limit: int,
) -> list[str]:  # fmt: skip
    """The uids of a project's live sandboxes of a job or with labels."""
    wanted = json_text(labels) if labels else None
    rows = await _all(connection, _SELECTED, project=project, job=job, labels=wanted, n=limit)
    return [r[0] for r in rows]


_STATES_ON = text("select uid, state, node from sandbox where uid = any(cast(:uids as text[])) ")
_FLAG_MISSING = text(
    "update sandbox set deadline_at = now() + make_interval(secs => :after) "
    "where node = :node and state in ('starting', 'running', 'pausing', 'paused', 'resuming') "
    "and not uid = any(cast(:live as text[])) and deadline_at is null"
)


async def over(connection: AsyncConnection, node: str, uids: Sequence[str]) -> list[str]:
    """Those of ``uids`` that should not live on ``node``: ended, elsewhere, unknown."""
    rows = await _all(connection, _STATES_ON, uids=list(uids))
    ended = ("stopped", "failed", "rejected", "lost")
    good = {uid for uid, state, on in rows if on == node and state not in ended}
    return [uid for uid in uids if uid not in good]


async def flag_missing(
    connection: AsyncConnection, node: str, live: Sequence[str], *, after_s: float
) -> None:
    """Gives sandboxes that a starting edge does not have a deadline: without a word
    from it they are lost then."""
    await connection.execute(_FLAG_MISSING, {"node": node, "live": list(live), "after": after_s})


_QUERY = """
    and (cast(:project as text) is null or s.project = :project)
    and (cast(:uids as text[]) is null or s.uid = any(cast(:uids as text[])))
    and (cast(:request_id as text) is null or s.request_id = :request_id)
    and (cast(:job as text) is null or s.job = :job)
    and (cast(:labels as text) is null or s.labels @> cast(:labels as jsonb))
    and (cast(:states as text[]) is null or s.state = any(cast(:states as text[])))
    and (cast(:node as text) is null or s.node = :node)
    and (cast(:after as text) is null or s.uid > :after)
    order by s.uid limit :n
"""
_LIST = text(_SELECT + "where s.request_id is not null" + _QUERY)


async def page(connection: AsyncConnection, query: SandboxQuery, limit: int) -> list[Sandbox]:
    """Sandboxes that meet every given filter, in uid order."""
    rows = await _all(
        connection, _LIST,
        project=query.project, uids=query.uids or None, request_id=query.request_id,
        job=query.job, labels=json_text(query.labels) if query.labels else None,
        states=list(query.states) or None, node=query.node, after=query.after, n=limit,
    )  # fmt: skip
    return [_sandbox(r) for r in rows]


def info(row: Sandbox, spec: SandboxSpec | None) -> SandboxInfo:
    """A row as clients see it."""
    return SandboxInfo(
        uid=row.uid, project=row.project, state=row.state,  # type: ignore[arg-type]
        generation=row.generation, backend=row.backend, created_at=row.created_at,
        changed_at=row.changed_at, id=row.public_id, node=row.node,
        request_id=row.request_id, index=row.index, principal=row.principal, cause=row.cause,
        is_infra=row.is_infra, message=row.message, error=row.error, job=row.job,
        labels=row.labels, spec=spec, enforcement=row.enforcement,
    )  # fmt: skip
