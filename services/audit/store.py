"""All SQL of audit: appending to the chain, reading pages, reading it all to verify."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.audit import AuditEntry, AuditPage, AuditQuery
from services.audit.chain import canonical, link
from services.audit.records import Row
from shared.db import Database

VERIFY_ROWS = 2_000
"""Entries read at a time while verifying."""

_INSERT = text(
    "insert into record (seq, kind, record_id, at, project, principal, verb, target, outcome,"
    " request_id, record, prev, hash) "
    "select seq, kind, record_id, at, project, principal, verb, target, outcome, request_id,"
    " cast(record as jsonb), prev, hash from unnest(cast(:seq as bigint[]),"
    " cast(:kind as text[]), cast(:record_id as text[]), cast(:at as double precision[]),"
    " cast(:project as text[]), cast(:principal as text[]), cast(:verb as text[]),"
    " cast(:target as text[]), cast(:outcome as text[]), cast(:request_id as text[]),"
    " cast(:record as text[]), cast(:prev as bytea[]), cast(:hash as bytea[]))"
    " as t(seq, kind, record_id, at, project, principal, verb, target, outcome, request_id,"
    " record, prev, hash)"
)
_KNOWN = text(
    "select r.kind, r.record_id from record r join unnest(cast(:kinds as text[]),"
    " cast(:ids as text[])) as t(kind, record_id) using (kind, record_id)"
)
_COLUMNS = ("kind", "record_id", "at", "project", "principal", "verb", "target", "outcome",
            "request_id")  # fmt: skip
_FILTERS = {
    "project": "project = :project",
    "principal": "principal = :principal",
    "verb": "verb = :verb",
    "target": "target = :target",
    "request_id": "request_id = :request_id",
    "since": "at >= :since",
    "before": "seq < :before",
}


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry's number and hash."""

    seq: int
    hash: bytes


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored entry as it is, for verification."""

    seq: int
    prev: bytes
    hash: bytes
    row: Row


class Store:
    """audit's access to its tables."""

    def __init__(self, db: Database, *, rows_per_transaction: int = 2_000) -> None:
        self._db = db
        self._rows = rows_per_transaction

    async def append(self, rows: Sequence[Row]) -> int:
        """Appends those rows whose id is not recorded yet; returns how many. Instances
        take turns on the head's row, so the chain has one order."""
        unique = list({(row.kind, row.record_id): row for row in reversed(rows)}.values())[::-1]
        added = 0
        for start in range(0, len(unique), self._rows):
            async with self._db.transaction() as connection:
                added += await _append(connection, unique[start : start + self._rows])
        return added

    async def page(self, query: AuditQuery) -> AuditPage:
        """Entries that match, newest first."""
        params: dict[str, Any] = {
            name: value for name in _FILTERS if (value := getattr(query, name)) is not None
        }
        where = [_FILTERS[name] for name in params]
        if query.projects:
            where.append("project = any(cast(:projects as text[]))")
            params["projects"] = list(query.projects)
        statement = text(
            "select seq, kind, cast(record as text), hash from record "
            f"where {' and '.join(where) or 'true'} order by seq desc limit :limit"
        )
        async with self._db.transaction() as connection:
            params["limit"] = query.limit + 1
            found = (await connection.execute(statement, params)).all()
        entries = [
            AuditEntry(seq=seq, kind=kind, record=msgspec.json.decode(record), hash=hash_.hex())
            for seq, kind, record, hash_ in found[: query.limit]
        ]
        return AuditPage(
            entries=entries, next=entries[-1].seq if len(found) > query.limit else None
        )

    async def head(self) -> Head:
        """The newest entry as the head's row names it."""
        async with self._db.transaction() as connection:
            return await _head(connection, lock=False)

    async def entries(self) -> AsyncIterator[Entry]:
        """Every entry, oldest first, read in pages."""
        after = 0
        statement = text(
            f"select seq, prev, hash, cast(record as text), {', '.join(_COLUMNS)} from record "
            "where seq > :after order by seq limit :limit"
        )
        while True:
            async with self._db.transaction() as connection:
                params = {"after": after, "limit": VERIFY_ROWS}
                found = (await connection.execute(statement, params)).all()
            for seq, prev, hash_, record, *columns in found:
                named = dict(zip(_COLUMNS, columns, strict=True))
                yield Entry(seq, prev, hash_, Row(**named, record=msgspec.json.decode(record)))
            if len(found) < VERIFY_ROWS:
                return
            after = found[-1][0]


async def _head(connection: AsyncConnection, *, lock: bool) -> Head:
    suffix = " for update" if lock else ""
    result = await connection.execute(text("select seq, hash from head where id = 1" + suffix))
    return Head(*result.one())


async def _append(connection: AsyncConnection, rows: Sequence[Row]) -> int:
    head = await _head(connection, lock=True)
    keys = {"kinds": [r.kind for r in rows], "ids": [r.record_id for r in rows]}
    known = {tuple(found) for found in await connection.execute(_KNOWN, keys)}
    fresh = [row for row in rows if (row.kind, row.record_id) not in known]
    if not fresh:
        return 0
    hashes = [head.hash]
    for seq, row in enumerate(fresh, head.seq + 1):
        hashes.append(link(hashes[-1], seq, row.kind, row.record))
    columns: dict[str, list[Any]] = {c: [getattr(r, c) for r in fresh] for c in _COLUMNS}
    columns["seq"] = list(range(head.seq + 1, head.seq + 1 + len(fresh)))
    columns["record"] = [canonical(row.record).decode() for row in fresh]
    columns["prev"], columns["hash"] = hashes[:-1], hashes[1:]
    await connection.execute(_INSERT, columns)
    await connection.execute(
        text("update head set seq = :seq, hash = :hash where id = 1"),
        {"seq": head.seq + len(fresh), "hash": hashes[-1]},
    )
    return len(fresh)
