"""SQL of the record: appending to the chain, reading pages, reading it all to verify,
making and dropping days."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.audit import AuditEntry, AuditPage, AuditQuery
from services.audit.chain import canonical, link
from services.audit.records import ACCESS, COLUMNS, VIOLATION, Row, from_anchor
from shared.db import Database, copy, fetch

VERIFY_ROWS = 2_000
"""Entries read at a time while verifying."""
KNOWN_DAYS = 4
"""A message comes again within these days: no stream keeps one as long."""
DAYS_AHEAD = 3
MORE_BETWEEN = 64
"""Ids beside those of a batch that are read before they are asked for one by one."""

_HEAD = text(
    "select seq, hash, greatest(day, (clock_timestamp() at time zone 'utc')::date) as day "
    "from head where id = 1 for update"
)
_KNOWN = text(
    "select r.kind, r.record_id from record r join unnest(cast(:kinds as text[]),"
    " cast(:ids as text[])) as t(kind, record_id) using (kind, record_id) "
    "where r.day >= cast(:since as date)"
)
_KNOWN_BETWEEN = text(
    "select t.number, r.record_id from unnest(cast(:kinds as text[]), cast(:lows as text[]),"
    " cast(:highs as text[]), cast(:mosts as bigint[]))"
    " with ordinality as t(kind, low, high, most, number) cross join lateral "
    "(select record_id from record where kind = t.kind and record_id >= t.low collate \"C\""
    " and record_id <= t.high collate \"C\" and day >= cast(:since as date) limit t.most) r"
)
_ENTRIES = text(
    "select seq, prev, hash, cast(record as text) as record, kind, record_id, at, project,"
    " principal, verb, target, outcome, request_id from record "
    "where seq > cast(:seq as bigint) order by seq limit cast(:n as bigint)"
)
_FILTERS = {
    "project": "project = :project",
    "principal": "principal = :principal",
    "verb": "verb = :verb",
    "target": "target = :target",
    "request_id": "request_id = :request_id",
    "kind": "kind = :kind",
    "outcome": "outcome = :outcome",
    "since": "at >= :since",
    "until": "at < :until",
    "before": "seq < :before",
}
_LISTS = {"projects": "project", "ids": "record_id"}

After = Callable[[], None]
Judge = Callable[[AsyncConnection, Sequence[Row]], Awaitable[tuple[list[Row], After]]]
"""Sees rows that are new, in the transaction that records them; returns further rows, and
what is to be done once it is committed."""


@dataclass(frozen=True, slots=True)
class Head:
    """The newest entry's number and hash; ``day`` is that of the next one."""

    seq: int
    hash: bytes
    day: datetime.date


@dataclass(frozen=True, slots=True)
class Anchor:
    """The last entry of days that are gone; number 0: none is."""

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
    """audit's access to its record."""

    def __init__(self, db: Database, *, rows_per_transaction: int = 2_000) -> None:
        self._db = db
        self._rows = rows_per_transaction

    async def append(self, rows: Sequence[Row], judge: Judge | None = None) -> int:
        """Appends those rows whose id is not recorded yet; returns how many. Instances
        take turns on the head's row, so the chain has one order, and so have the windows
        of rules that ``judge`` looks at."""
        unique = list({(row.kind, row.record_id): row for row in reversed(rows)}.values())[::-1]
        added = 0
        for start in range(0, len(unique), self._rows):
            added += await self._append(unique[start : start + self._rows], judge)
        return added

    async def _append(self, rows: Sequence[Row], judge: Judge | None) -> int:
        after: After | None = None
        async with self._db.transaction() as connection:
            head = await _lock(connection)
            fresh = await _unknown(connection, head.day, rows)
            if not fresh:
                return 0
            found: list[Row] = []
            if judge is not None:
                found, after = await judge(connection, fresh)
            await _write(connection, head, [*fresh, *found])
        if after is not None:
            after()
        return len(fresh)

    async def page(self, query: AuditQuery) -> AuditPage:
        """Entries that match, newest first."""
        found = await self._matching(query, query.limit + 1)
        entries = [
            AuditEntry(
                seq=row["seq"], kind=row["kind"], record=msgspec.json.decode(row["record"]),
                hash=row["hash"].hex(), id=row["record_id"],
            )
            for row in found[: query.limit]
        ]  # fmt: skip
        return AuditPage(
            entries=entries, next=entries[-1].seq if len(found) > query.limit else None
        )

    async def violations(self, query: AuditQuery, limit: int) -> list[tuple[str, dict[str, Any]]]:
        """Ids and contents of violations that match, oldest first; of more than ``limit``
        the newest."""
        query = msgspec.structs.replace(query, kind=VIOLATION)
        found = await self._matching(query, limit)
        return [(row["record_id"], msgspec.json.decode(row["record"])) for row in reversed(found)]

    async def _matching(self, query: AuditQuery, limit: int) -> list[Any]:
        params: dict[str, Any] = {
            name: value for name in _FILTERS if (value := getattr(query, name)) is not None
        }
        where = [_FILTERS[name] for name in params]
        for name, column in _LISTS.items():
            if values := getattr(query, name):
                one = len(values) == 1  # which an index can be read in order for
                where.append(f"{column} = " + (f":{name}" if one else f"any(:{name})"))
                params[name] = values[0] if one else values
        statement = text(
            "select seq, kind, record_id, cast(record as text) as record, hash from record "
            f"where {' and '.join(where) or 'true'} order by seq desc "
            "limit cast(:limit as bigint)"
        )
        params["limit"] = limit
        async with self._db.transaction() as connection:
            return await fetch(connection, statement, params)

    async def head(self) -> Head:
        """The newest entry as the head's row names it."""
        async with self._db.transaction() as connection:
            result = await connection.execute(text("select seq, hash, day from head where id = 1"))
            return Head(*result.one())

    async def anchor(self) -> Anchor:
        """What the chain begins behind."""
        async with self._db.transaction() as connection:
            rows = await fetch(
                connection, text("select seq, hash from anchor order by seq desc limit 1")
            )
        return Anchor(rows[0]["seq"], rows[0]["hash"]) if rows else Anchor(0, bytes(32))

    async def entries(self, after: int = 0, *, most: int | None = None) -> AsyncIterator[Entry]:
        """Entries behind number ``after``, oldest first, read in pages; ``most`` of them."""
        seq, left = after, most
        while left is None or left > 0:
            size = VERIFY_ROWS if left is None else min(left, VERIFY_ROWS)
            async with self._db.transaction() as connection:
                found = await fetch(connection, _ENTRIES, {"seq": seq, "n": size})
            for row in found:
                named = {name: row[name] for name in COLUMNS}
                record = msgspec.json.decode(row["record"])
                yield Entry(row["seq"], row["prev"], row["hash"], Row(**named, record=record))
            if len(found) < size:
                return
            seq = found[-1]["seq"]
            left = None if left is None else left - size

    async def keep_days(self, *, root: str) -> int:
        """Makes the partitions of the next days, drops those that are older than the
        administrator keeps them, and records what went; returns how many went."""
        async with self._db.transaction() as connection:
            head = await _lock(connection)
            make = text("select make_days(cast(:day as date), cast(:n as integer))")
            await connection.execute(make, {"day": head.day, "n": DAYS_AHEAD + 1})
            gone = await fetch(
                connection,
                text("select seq, hash, day, entries, extract(epoch from at)::float8 as at "
                     "from drop_days()"),
            )  # fmt: skip
            rows = [
                from_anchor(
                    seq=row["seq"], hash_=row["hash"], day=str(row["day"]),
                    entries=row["entries"], at=row["at"], root=root,
                )
                for row in gone
            ]  # fmt: skip
            if rows:
                await _write(connection, head, rows)
        return len(rows)


async def _lock(connection: AsyncConnection) -> Head:
    (row,) = await fetch(connection, _HEAD)
    return Head(*row)


async def _unknown(
    connection: AsyncConnection, day: datetime.date, rows: Sequence[Row]
) -> list[Row]:
    since = day - datetime.timedelta(days=KNOWN_DAYS)
    known, others = await _known_between(connection, since, rows)
    if others:
        keys: dict[str, Any] = {
            "kinds": [row.kind for row in others], "ids": [row.record_id for row in others],
            "since": since,
        }  # fmt: skip
        known |= {tuple(found) for found in await fetch(connection, _KNOWN, keys)}
    return [row for row in rows if row[:2] not in known] if known else list(rows)


async def _known_between(
    connection: AsyncConnection, since: datetime.date, rows: Sequence[Row]
) -> tuple[set[tuple[str, ...]], list[Row]]:
    """Which of ``rows`` are recorded, and those of which that is still to be asked one by
    one. Ids of accesses are ULIDs: of one reporter nothing is recorded between the first
    and the last of a batch, but of this batch before, and what was made in the same
    millisecond. Where that does not hold (a node chooses its ids) there is more."""
    groups: dict[str, list[Row]] = {}
    others = []
    for row in rows:
        if row.kind == ACCESS:
            groups.setdefault(row.record_id.partition("/")[0], []).append(row)
        else:
            others.append(row)
    if not groups:
        return set(), others
    ids = [[row.record_id for row in group] for group in groups.values()]
    mosts = [2 * len(group) + MORE_BETWEEN for group in ids]
    ranges: dict[str, Any] = {
        "kinds": [ACCESS] * len(ids), "lows": list(map(min, ids)), "highs": list(map(max, ids)),
        "mosts": mosts, "since": since,
    }  # fmt: skip
    found: list[list[str]] = [[] for _ in ids]
    for number, record_id in await fetch(connection, _KNOWN_BETWEEN, ranges):
        found[number - 1].append(record_id)
    for group, between, most in zip(groups.values(), found, mosts, strict=True):
        if len(between) >= most:
            others += group
    return {(ACCESS, record_id) for between in found for record_id in between}, others


async def _write(connection: AsyncConnection, head: Head, rows: Sequence[Row]) -> None:
    """Links rows to the chain."""
    values = []
    day, previous = head.day, head.hash
    for seq, row in enumerate(rows, head.seq + 1):
        content = canonical(row.record)
        hash_ = link(previous, seq, row.kind, content)
        values.append((day, seq, *row[:-1], content.decode(), previous, hash_))
        previous = hash_
    await copy(connection, "record", ("day", "seq", *COLUMNS, "record", "prev", "hash"), values)
    await connection.execute(
        text("update head set seq = :seq, hash = :hash, day = :day where id = 1"),
        {"seq": head.seq + len(rows), "hash": previous, "day": head.day},
    )
