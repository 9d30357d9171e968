"""SQL on sandboxes and their transitions.

Owns: statements, each for a whole batch (arrays, ``unnest``). Does not own: nodes
(``nodes``), requests, specs and operations (``requests``), the order of a transaction
(``work``) or any decision.

Locks are taken in one order everywhere: sandboxes by uid, then nodes by id, then
operations by id. A deadlock that another client causes is retried as an outage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import WireError, decode
from services.scheduler.model import Sandbox, Step, json_text
from services.scheduler.turns import Queue
from shared import db
from shared.errors import Unavailable

SELECT = """
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


def sandbox_of(row: Any) -> Sandbox:
    """A row of ``SELECT``."""
    values = dict(row)
    labels, error = values["labels"], values["error"]
    tried, enforcement = values.pop("tried_nodes"), values["enforcement"]
    values["labels"] = json.loads(labels) if labels != "{}" else {}
    values["error"] = decode(error.encode(), WireError) if error else None
    values["enforcement"] = json.loads(enforcement) if enforcement else {}
    return Sandbox(tried=tuple(tried.split(",")) if tried else (), **values)


async def fetch(connection: AsyncConnection, sql: TextClause, **parameters: Any) -> list[Any]:
    """All rows of a statement."""
    return await db.fetch(connection, sql, parameters)


_LOCK = text(SELECT + "where s.uid = any(cast(:uids as text[])) order by s.uid for update of s")
_FIND = text(SELECT + "where s.uid = any(cast(:uids as text[]))")


async def lock(connection: AsyncConnection, uids: Iterable[str]) -> list[Sandbox]:
    """The rows of ``uids``, locked; unknown ones are absent."""
    return [sandbox_of(r) for r in await fetch(connection, _LOCK, uids=sorted(set(uids)))]


async def find(connection: AsyncConnection, uids: Iterable[str]) -> list[Sandbox]:
    """The rows of ``uids``, not locked."""
    return [sandbox_of(r) for r in await fetch(connection, _FIND, uids=list(uids))]


_OVERDUE = text(
    SELECT + "where s.deadline_at < to_timestamp(:now) "
    "order by s.uid limit :n for update of s skip locked"
)
_ON_GONE_NODES = text(
    SELECT + f"where s.state in {ON_NODE} and s.node in (select id from node "
    "where lost_at < to_timestamp(:before)) order by s.uid limit :n for update of s skip locked"
)
_ON_DRAINING = text(
    SELECT + f"where s.state in {ON_NODE} and s.state <> 'stopping' and s.node in "
    "(select id from node where admin = 'draining') "
    "order by s.uid limit :n for update of s skip locked"
)


async def lock_overdue(connection: AsyncConnection, now: float, limit: int) -> list[Sandbox]:
    """A portion of the rows whose deadline has passed, locked; rows that another
    scheduler works on are left to it."""
    return [sandbox_of(r) for r in await fetch(connection, _OVERDUE, now=now, n=limit)]


async def lock_on_gone_nodes(
    connection: AsyncConnection, before: float, limit: int
) -> list[Sandbox]:
    """A portion of the sandboxes of nodes lost before ``before``, locked."""
    return [sandbox_of(r) for r in await fetch(connection, _ON_GONE_NODES, before=before, n=limit)]


async def lock_on_draining(connection: AsyncConnection, limit: int) -> list[Sandbox]:
    """A portion of the sandboxes that draining nodes still run, locked."""
    return [sandbox_of(r) for r in await fetch(connection, _ON_DRAINING, n=limit)]


_IN_QUEUE = "state = 'requested' and cause = 'capacity'"
_QUEUE = text(
    "select project, count(*), min(cores), min(memory_mb) from sandbox "
    f"where {_IN_QUEUE} group by project"
)
_NEXT = text(
    f"{SELECT} join (select uid, row_number() over "
    "(partition by project order by created_at, request_id, index) as turn "
    f"from sandbox where {_IN_QUEUE} order by turn, created_at offset :skip limit :n) q "
    "on q.uid = s.uid where s.state = 'requested' and s.cause = 'capacity' "
    "order by q.turn, s.created_at for update of s skip locked"
)


async def queue(connection: AsyncConnection) -> Queue:
    """What waits for room."""
    rows = await fetch(connection, _QUEUE)
    if not rows:
        return Queue({})
    return Queue({r[0]: r[1] for r in rows}, min(r[2] for r in rows), min(r[3] for r in rows))


async def lock_next(connection: AsyncConnection, limit: int, *, skip: int = 0) -> list[Sandbox]:
    """A portion of the queue in its order, locked, after the first ``skip``; rows that
    another scheduler works on are left to it."""
    return [sandbox_of(r) for r in await fetch(connection, _NEXT, n=limit, skip=skip)]


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
        "memory_mb": row.memory_mb,
        "job": row.job.replace("\x00", "") if row.job else row.job,
        "labels": json_text(row.labels) if row.labels else "{}",
        "expires_at": row.expires_at, "created_at": row.created_at,
    }  # fmt: skip


_STEP = {
    "uid": "text", "generation": "bigint", "source": "text", "target": "text", "event": "text",
    "by": "text", "cause": "text", "at": "float8",
}  # fmt: skip
_STEPS = {f"step_{name}": kind for name, kind in _STEP.items()}
_HISTORY = (
    f"with history as (insert into transition ({', '.join(_STEP)}) "
    "select step_uid, step_generation, step_source, step_target, step_event, step_by, "
    f"step_cause, to_timestamp(step_at) from {_unnest(_STEPS)}) "
)
"""Goes with what it is the history of: a statement is a way to the server and back."""

_INSERTED = {**_CHANGING, **_FIXED}
_QUOTED = ", ".join(f'"{c}"' for c in _INSERTED)
_INSERT = text(
    f"{_HISTORY}insert into sandbox ({_QUOTED}) "
    f"select {', '.join(_as(c) for c in _INSERTED)} from {_unnest(_INSERTED)} "
    "on conflict (uid) do nothing returning uid"
)
_WAS = {"was_state": "text", "was_generation": "bigint"}
_UPDATE = text(
    f"{_HISTORY}update sandbox s set "
    + ", ".join(f"{c} = {_as(c)}" for c in _CHANGING if c != "uid")
    + f" from {_unnest({**_CHANGING, **_WAS})} where s.uid = n.uid "
    "and s.state = n.was_state and s.generation = n.was_generation returning s.uid"
)


async def write(
    connection: AsyncConnection, fresh: Sequence[Sandbox], known: Sequence[Sandbox],
    was: Mapping[str, Sandbox], steps: Sequence[Step],
) -> None:  # fmt: skip
    """Inserts new rows, writes locked ones back, each by compare-and-swap of state and
    generation, and appends ``steps`` to the history. Raises ``Unavailable`` (the batch comes
    again) where one was created or changed meanwhile."""
    if fresh or not known:
        await _insert(connection, fresh, steps)
        steps = ()
    if known:
        await _update(connection, known, was, steps)


def _history(steps: Sequence[Step]) -> dict[str, Any]:
    return {f"step_{name}": [getattr(step, name) for step in steps] for name in _STEP}


async def _insert(
    connection: AsyncConnection, rows: Sequence[Sandbox], steps: Sequence[Step]
) -> None:
    if not rows and not steps:
        return
    ordered = [_values(r) for r in sorted(rows, key=lambda r: r.uid)]
    columns = _arrays(_INSERTED, ordered)
    written = await fetch(connection, _INSERT, **columns, **_history(steps))
    if len(written) != len(rows):
        raise Unavailable("sandboxes were created by another scheduler meanwhile")


async def _update(
    connection: AsyncConnection, rows: Sequence[Sandbox], was: Mapping[str, Sandbox],
    steps: Sequence[Step],
) -> None:  # fmt: skip
    values = [
        _values(r) | {"was_state": was[r.uid].state, "was_generation": was[r.uid].generation}
        for r in rows
    ]
    columns = _arrays({**_CHANGING, **_WAS}, values)
    written = await fetch(connection, _UPDATE, **columns, **_history(steps))
    if len(written) != len(rows):
        raise Unavailable(f"{len(rows) - len(written)} sandboxes changed meanwhile")


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
    "where s.uid = n.uid and s.project = n.project and s.request_id is null "
    "returning s.uid"
)


async def put_tombstones(
    connection: AsyncConnection, stops: Sequence[tuple[str, str, str]]
) -> None:
    """Remembers stops (uid, project, principal) of sandboxes not yet created, so
    that a create that comes later starts nothing. Raises ``Unavailable`` where one
    was created meanwhile."""
    unique = {uid: (uid, project, principal) for uid, project, principal in stops}.values()
    parameters = {k: [s[i] for s in unique] for i, k in enumerate("upw")}
    if len(await fetch(connection, _TOMBSTONES, **parameters)) != len(unique):
        raise Unavailable("a sandbox was created while it was stopped")


async def adopt(connection: AsyncConnection, rows: Sequence[Sandbox]) -> list[str]:
    """Completes the rows of stops that came before their create; returns the uids
    that nobody had completed yet."""
    if not rows:
        return []
    values = [_values(r) for r in sorted(rows, key=lambda r: r.uid)]
    columns = {"uid": "text", **_FIXED}
    return [r[0] for r in await fetch(connection, _ADOPT, **_arrays(columns, values))]


_SELECTED = text(
    "select s.uid from sandbox s left join request r on r.request_id = s.request_id "
    f"where s.project = :project and {LIVE} "
    "and (cast(:asked_at as float8) is null or r.asked_at is null "
    "or r.asked_at <= to_timestamp(cast(:asked_at as float8))) "
    "and (cast(:job as text) is null or s.job = :job) "
    "and (cast(:labels as text) is null or s.labels @> cast(:labels as jsonb)) limit :n"
)


async def select_live(
    connection: AsyncConnection, project: str, *, job: str | None, labels: Mapping[str, str],
    asked_at: float | None, limit: int,
) -> list[str]:  # fmt: skip
    """The uids of a project's live sandboxes of a job or with labels that were asked
    for by ``asked_at``."""
    wanted = json_text(labels) if labels else None
    rows = await fetch(
        connection, _SELECTED, project=project, job=job, labels=wanted, asked_at=asked_at,
        n=limit,
    )
    return [r[0] for r in rows]
