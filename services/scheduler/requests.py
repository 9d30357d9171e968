"""SQL of what sandboxes share or wait for: requests, specs, pending operations.

Owns: statements on ``request``, ``spec`` and ``op``. Does not own: sandboxes
(``store``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.sandbox import CreateCommand, ItemResult
from services.scheduler.model import json_text
from services.scheduler.sending import SpecKey
from services.scheduler.store import fetch
from shared import db

_SPECS_IN = (
    "insert into spec (request_id, idx, resolved, body) select r, i, s, b from "
    "unnest(cast(:sr as text[]), cast(:si as int[]), cast(:ss as boolean[]), "
    "cast(:sb as bytea[])) as n(r, i, s, b) order by r, i "
    "on conflict (request_id, idx) do update set resolved = true, body = excluded.body "
    "where not spec.resolved and excluded.resolved"
)
_PUT_SPECS = text(_SPECS_IN)
_PUT_REQUESTS = text(
    f"with specs as ({_SPECS_IN}) insert into request "
    "(request_id, project, principal, reply_to, total, trace, projects, asked_at) "
    "select i, p, w, r, t, c, j::jsonb, coalesce(to_timestamp(a), now()) from unnest("
    "cast(:i as text[]), cast(:p as text[]), cast(:w as text[]), cast(:r as text[]), "
    "cast(:t as int[]), cast(:c as text[]), cast(:j as text[]), cast(:a as float8[])) "
    "as n(i, p, w, r, t, c, j, a) order by i "
    "on conflict (request_id) do update set reply_to = excluded.reply_to "
    "where request.project = excluded.project "
    "and request.reply_to is distinct from excluded.reply_to"
)

Specs = Mapping[SpecKey, tuple[bytes, bool]]
"""Encoded ``ResolvedSpec``s, with whether their images are resolved."""


def _of(specs: Specs) -> dict[str, list[object]]:
    return {
        "sr": [r for r, _ in specs],
        "si": [i for _, i in specs],
        "ss": [done for _, done in specs.values()],
        "sb": [body for body, _ in specs.values()],
    }


async def put_requests(
    connection: AsyncConnection, commands: Sequence[CreateCommand], specs: Specs
) -> None:
    """Stores what a request's sandboxes share, and their specs; a repeated one brings its
    new reply subject."""
    last = {c.request_id: c for c in commands}.values()
    parameters = {
        "i": [c.request_id for c in last],
        "p": [c.project for c in last],
        "w": [c.principal for c in last],
        "r": [c.reply_to for c in last],
        "t": [c.total for c in last],
        "c": [c.trace for c in last],
        "j": [json_text(c.projects or [c.project]) for c in last],
        "a": [c.asked_at or None for c in last],
    }
    await db.fetch(connection, _PUT_REQUESTS, parameters | _of(specs))


async def put_specs(connection: AsyncConnection, specs: Specs) -> None:
    """Stores specs of requests that are stored."""
    if specs:
        await db.fetch(connection, _PUT_SPECS, _of(specs))


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
    rows = await fetch(connection, _SPECS, **parameters)
    return {(r, i): (bytes(body), done, json.loads(p)) for r, i, body, done, p in rows}


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
_SILENT_OPS = text(
    "with open as (select s.op_id, bool_and(n.lost_at is not null) as silent "
    "from sandbox s join node n on n.id = s.node "
    "where s.op_id in (select b.op_id from node a join sandbox b on b.node = a.id "
    "and b.state in ('pausing', 'resuming', 'stopping') where a.lost_at is not null) "
    "and s.state in ('pausing', 'resuming', 'stopping') group by s.op_id) "
    "select request_id, reply_to, uids, settled from op "
    "where request_id in (select op_id from open where silent) "
    "order by request_id limit :n for update skip locked"
)
_results = msgspec.json.Decoder(list[ItemResult])


async def put_op(
    connection: AsyncConnection, request_id: str, reply_to: str | None, *,
    uids: Sequence[str], settled: Sequence[ItemResult], remaining: int,
) -> None:  # fmt: skip
    """Remembers an operation that waits for sandboxes. The caller holds their locks,
    so that ``remaining`` is exact also when the operation comes again."""
    await db.fetch(
        connection,
        _PUT_OP,
        {
            "id": request_id, "reply_to": reply_to, "uids": list(uids), "remaining": remaining,
            "settled": json_text(settled).encode(),
        },
    )  # fmt: skip


async def take_silent_ops(
    connection: AsyncConnection, limit: int
) -> list[tuple[str, str | None, list[str], list[ItemResult]]]:
    """Deletes and returns operations that wait for silent nodes only, as
    :func:`settle_ops` does those that are complete."""
    rows = await fetch(connection, _SILENT_OPS, n=limit)
    if rows:
        await db.fetch(connection, _DELETE_OPS, {"ids": [r[0] for r in rows]})
    return [(r[0], r[1], r[2], _results.decode(r[3])) for r in rows]


async def settle_ops(
    connection: AsyncConnection, counts: Mapping[str, int]
) -> list[tuple[str, str | None, list[str], list[ItemResult]]]:
    """Counts settled sandboxes; returns and deletes the operations that are
    complete: request id, reply subject, uids, results known from the start."""
    if not counts:
        return []
    ids = sorted(counts)
    rows = await fetch(connection, _SETTLE_OPS, ids=ids, counts=[counts[i] for i in ids])
    done = [r for r in rows if r[4] <= 0]
    if done:
        await db.fetch(connection, _DELETE_OPS, {"ids": [r[0] for r in done]})
    return [(r[0], r[1], r[2], _results.decode(r[3])) for r in done]
