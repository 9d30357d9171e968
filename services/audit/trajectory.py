"""The trajectory log of all sandboxes: what edges told, kept after node and sandbox.

Owns: its tables' SQL, what is kept of it and how long. Does not own: the record of verbs
(:mod:`services.audit.store`), which is kept for ever and holds no payloads.

A row is of the node that told it, as the bus knows that node: a captured edge can say
nothing of another one's sandboxes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import asyncpg
import msgspec
from sqlalchemy import TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import decode
from schemas.trajectory import TRAJECTORY_PAGE_BYTES, TrajectoryQuery
from shared.bus import Incoming
from shared.consumer import Received
from shared.db import Database, copy, fetch
from shared.errors import InvalidRequest
from shared.periodic import portions
from shared.trajectory import Page, Record, Records

log = logging.getLogger(__name__)

HOUR_S = 3_600
PORTION = 2_000
"""Rows deleted by one statement."""
UID_CHARS = 26
BIGINT_MAX = (1 << 63) - 1

_COLUMNS = {
    "node": "text", "uid": "text", "seq": "bigint", "project": "text", "op_id": "text",
    "verb": "text", "principal": "text", "at": "double precision", "lane": "text",
    "step": "bigint", "cut": "bigint", "ended_at": "double precision", "hour": "integer",
    "request": "bytea", "reply": "bytea", "begun_at": "double precision",
}  # fmt: skip
_UPSERT = text(
    f"insert into trajectory ({', '.join(_COLUMNS)}) select * from unnest("
    + ", ".join(f"cast(:{name} as {kind}[])" for name, kind in _COLUMNS.items())
    + ") on conflict (node, uid, seq) do update "
    "set ended_at = excluded.ended_at, reply = excluded.reply "
    "where trajectory.ended_at is null and excluded.ended_at is not null"
)
_LAST = text(
    "select node, uid, (select max(seq) from trajectory r where r.node = t.node and r.uid = t.uid)"
    " from unnest(cast(:nodes as text[]), cast(:uids as text[])) as t(node, uid)"
)
COUNT = text(
    "insert into trajectory_hour (hour, bytes) values (:hour, :bytes) "
    "on conflict (hour) do update set bytes = trajectory_hour.bytes + excluded.bytes"
)
_PAGE = text(
    "with found as (select *, octet_length(request) + octet_length(reply) + 300 as size "
    "from trajectory where node = :node and uid = :uid and project = :project "
    "and seq > :after order by seq limit :n), "
    "sums as (select *, sum(size) over (order by seq) - size as before, "
    "count(*) over () as there from found) "
    "select uid, project, seq, op_id, verb, principal, at, lane, step, request, cut, "
    "ended_at, reply, begun_at, there from sums where before = 0 or before + size <= :bytes "
    "order by seq"
)
_FIELDS = Record.__struct_fields__
_DUE = text(
    "select hour from (select hour, sum(bytes) over (order by hour desc) as newer "
    "from trajectory_hour) t where hour < :oldest or newer > :most order by hour"
)
_FORGET = text(
    "delete from trajectory where (node, uid, seq) in "
    "(select node, uid, seq from trajectory where hour = :hour limit :n)"
)
_FORGET_OUTPUTS = text(
    "delete from trajectory_output where ctid = any(array("
    "select ctid from trajectory_output where hour = :hour limit :n))"
)
_FORGOTTEN = text("delete from trajectory_hour where hour = :hour")


class Trajectories:
    """``keep_s``: how long records are kept at least where ``max_bytes`` allow it; the
    oldest hours go first."""

    def __init__(self, db: Database, *, keep_s: float, max_bytes: int) -> None:
        self._db = db
        self._keep_s = keep_s
        self._max_bytes = max_bytes

    async def told(self, batch: Sequence[Received]) -> None:
        """``dsec.trj.v1.<node>``: new records and results. Repeated ones are harmless. One
        that cannot be kept costs itself, not those beside it: they are of other tenants."""
        told: dict[tuple[str, str, int], Record] = {}
        for item in batch:
            node = item.subject.rpartition(".")[2]
            for record in decode(item.data, Records).records:
                if not storable(record):
                    log.error("a record of node %s cannot be kept: %.200r", node, record)
                    continue
                key = (node, record.uid, record.seq)
                if key not in told or told[key].ended_at is None:
                    told[key] = record
        if not told:
            return
        hour = int(time.time() // HOUR_S)
        rows = [_row(node, hour, record) for (node, _, _), record in told.items()]
        size = sum(record.size for record in told.values())
        try:
            await self._keep(rows, hour, size)
        except asyncpg.UniqueViolationError:  # another instance was told the same meanwhile
            await self._keep(rows, hour, size, new=False)

    async def _keep(
        self, rows: Sequence[tuple[Any, ...]], hour: int, size: int, *, new: bool = True
    ) -> None:
        """``new``: rows behind the last one of their sandbox go in by COPY, which is half
        the work of an insertion that looks for each of them."""
        async with self._db.transaction() as connection:
            last = await _last(connection, {row[:2] for row in rows}) if new else {}
            known = [row for row in rows if not new or row[2] <= last[row[:2]]]
            if known:
                columns = dict(zip(_COLUMNS, map(list, zip(*known, strict=True)), strict=True))
                await fetch(connection, _UPSERT, columns)
            if len(known) < len(rows):
                added = [row for row in rows if row[2] > last[row[:2]]]
                await copy(connection, "trajectory", tuple(_COLUMNS), added)
            await connection.execute(COUNT, {"hour": hour, "bytes": size})

    async def page(self, query: TrajectoryQuery, _: Incoming) -> Page:
        """Answers ``audit.trajectory``. The asker says which project may be seen."""
        if query.project is None:
            raise InvalidRequest("a trajectory's project must be named", field="project")
        params = {
            "node": query.node, "uid": query.uid, "project": query.project,
            "after": query.after, "n": query.limit + 1, "bytes": TRAJECTORY_PAGE_BYTES,
        }  # fmt: skip
        async with self._db.transaction() as connection:
            found = (await connection.execute(_PAGE, params)).all()
        records = [_record(row._mapping) for row in found[: query.limit]]
        return Page(records=records, more=bool(found) and found[0].there > len(records))

    async def forget(self) -> int:
        """Deletes what is too old or too much; returns how many rows."""
        params = {"oldest": int((time.time() - self._keep_s) // HOUR_S), "most": self._max_bytes}
        async with self._db.transaction() as connection:
            due = (await connection.execute(_DUE, params)).scalars().all()
        return sum([await self._forget(hour) for hour in due])

    async def _forget(self, hour: int) -> int:
        gone = 0
        for statement in (_FORGET, _FORGET_OUTPUTS):
            portion = self._db.portion(partial(_portion, statement, hour))
            gone += await portions(portion, size=PORTION, most=1_000_000)
        async with self._db.transaction() as connection:
            await connection.execute(_FORGOTTEN, {"hour": hour})
        return gone


def _row(node: str, hour: int, r: Record) -> tuple[Any, ...]:
    """Values of ``_COLUMNS``."""
    return (
        node, r.uid, r.seq, r.project, r.op_id, r.verb, r.principal, r.at, r.lane, r.step, r.cut,
        r.ended_at, hour, bytes(r.request), bytes(r.reply), r.begun_at,
    )  # fmt: skip


async def _last(
    connection: AsyncConnection, sandboxes: Collection[tuple[Any, ...]]
) -> dict[tuple[Any, ...], int]:
    """The highest number of each (node, uid); -1 where there is none."""
    keys = {"nodes": [node for node, _ in sandboxes], "uids": [uid for _, uid in sandboxes]}
    rows = await fetch(connection, _LAST, keys)
    return {(node, uid): -1 if seq is None else seq for node, uid, seq in rows}


async def _portion(statement: TextClause, hour: int, connection: AsyncConnection) -> int:
    params = {"hour": hour, "n": PORTION}
    return int((await connection.execute(statement, params)).rowcount)


def storable(record: Record) -> bool:
    """Whether the columns take it; request and reply are bytes there, of any content."""
    r = record
    return (
        len(r.uid) <= UID_CHARS
        and "\0" not in f"{r.uid}{r.project}{r.op_id}{r.verb}{r.principal}{r.lane}"
        and 0 <= r.seq <= BIGINT_MAX
        and 0 <= (r.step or 0) <= BIGINT_MAX
        and 0 <= r.cut <= BIGINT_MAX
    )


def _record(row: Any) -> Record:
    values = {name: row[name] for name in _FIELDS}
    for name in ("request", "reply"):
        values[name] = msgspec.Raw(values[name])
    return Record(**values)
