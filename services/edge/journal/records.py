"""The journal's tables and the statements that change them.

Owns: all SQL of the edge. Does not own: when it is committed (:mod:`journal`).
A :data:`Change` is one statement; changes written together are committed together.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from schemas.base import Versioned, decode, encode
from schemas.sandbox import EdgeOpItem, Observation, ResolvedSpec, StartItem
from services.edge.drivers.base import Handle
from services.edge.journal import timerecords
from services.edge.journal.claims import Claim
from services.edge.sandbox.rules import Times
from services.edge.sandbox.verifying import Kept

SCHEMA_VERSION = 2
SENT_ROWS = 250
"""Rows deleted by one statement; SQLite's bound of parameters is 999 and more."""

Change = tuple[str, tuple[Any, ...]]

SCHEMA = """
create table if not exists meta (key text primary key, value text not null) without rowid;
create table if not exists sandbox (
    uid text primary key, generation integer not null, accepted blob not null,
    handle text, epoch integer not null default 0, started_at real,
    idle_s real, deadline_s real, paused integer not null default 0,
    seq integer not null default 0
) without rowid;
create table if not exists op (
    uid text not null, verb text not null, item blob not null, primary key (uid, verb)
) without rowid;
create table if not exists tombstone (
    uid text primary key, generation integer not null, observation blob not null,
    at real not null
) without rowid;
create index if not exists tombstone_at on tombstone (at);
create table if not exists exec (
    uid text not null, op_id text not null, hash blob not null, at real not null, reply blob,
    seq integer not null default 0, record blob, ended_at real,
    told integer not null default 0, primary key (uid, op_id)
);
create index if not exists exec_at on exec (at);
create index if not exists exec_seq on exec (uid, seq);
create table if not exists outbox (
    id integer primary key, kind text not null, data blob not null
);
""" + timerecords.SCHEMA

UPGRADES: dict[int, tuple[str, ...]] = {
    1: (
        "alter table sandbox add column seq integer not null default 0",
        "alter table exec add column seq integer not null default 0",
        "alter table exec add column record blob",
        "alter table exec add column ended_at real",
        "alter table exec add column told integer not null default 0",
    ),
}
"""From a version to the next one."""

WHOLE = (
    "insert or ignore into exec (uid, op_id, hash, at, seq, record, reply, ended_at) "
    "values (?,?,?,?,?,?,?,?)"
)
OUTBOX = "insert or replace into outbox values (?,?,?)"

INTENT_TOLD, RESULT_TOLD = 1, 2
"""What of a record the services have, in ``told``."""
TOLD = f"(seq = 0 or told >= case when reply is null then {INTENT_TOLD} else {RESULT_TOLD} end)"
"""Whether nothing of an operation is still to be told."""


class Accepted(Versioned, frozen=True):
    """A start as it was accepted."""

    item: StartItem
    resolved: ResolvedSpec


@dataclass(frozen=True, slots=True)
class SandboxRow:
    """A sandbox as the journal knows it. ``handle`` is ``None`` until it started."""

    accepted: Accepted
    generation: int
    times: Times
    handle: Handle | None = None
    epoch: int = 0
    started_at: float | None = None
    paused: bool = False
    seq: int = 0
    kept: Kept = Kept()

    @property
    def uid(self) -> str:
        """The sandbox's id."""
        return self.accepted.item.uid


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a sandbox ended here, to be said again to a late command."""

    generation: int
    observation: Observation


@dataclass(frozen=True, slots=True)
class ExecRow:
    """An operation that was begun. ``reply`` is ``None`` where its end is unknown; ``seq``
    is its number in the sandbox, ``record`` the trajectory's of its intent."""

    hash: bytes
    reply: bytes | None
    seq: int = 0
    record: bytes | None = None


def accept(row: SandboxRow) -> Change:
    """A start, before anything is done for it."""
    return (
        "insert or replace into sandbox (uid, generation, accepted, idle_s, deadline_s) "
        "values (?,?,?,?,?)",
        (row.uid, row.generation, encode(row.accepted), row.times.idle_s, row.times.deadline_s),
    )


def started(uid: str, handle: Handle, started_at: float) -> Change:
    """It runs: from here a new edge process finds it by its handle."""
    return (
        "update sandbox set handle = ?, started_at = ? where uid = ?",
        (_handle_text(handle), started_at, uid),
    )


def recovered(uid: str, handle: Handle, epoch: int) -> Change:
    """It was found again after a restart of the edge."""
    return (
        "update sandbox set handle = ?, epoch = ? where uid = ?",
        (_handle_text(handle), epoch, uid),
    )


def state(uid: str, generation: int, *, paused: bool, times: Times) -> Change:
    """What operations changed."""
    return (
        "update sandbox set generation = ?, paused = ?, idle_s = ?, deadline_s = ? where uid = ?",
        (generation, int(paused), times.idle_s, times.deadline_s, uid),
    )


def repoliced(uid: str, accepted: Accepted, handle: Handle) -> Change:
    """Other rules are in force: a new edge process puts these into force again."""
    return (
        "update sandbox set accepted = ?, handle = ? where uid = ?",
        (encode(accepted), _handle_text(handle), uid),
    )


def respecified(uid: str, accepted: Accepted) -> Change:
    """Its spec says something else from here on."""
    return "update sandbox set accepted = ? where uid = ?", (encode(accepted), uid)


def adopted(uid: str, generation: int) -> Change:
    """It goes on under a newer command."""
    return "update sandbox set generation = ? where uid = ?", (generation, uid)


def op(verb: str, item: EdgeOpItem) -> Change:
    """An operation that is to be done; the newest of a kind counts."""
    return "insert or replace into op values (?,?,?)", (item.uid, verb, encode(item))


def op_done(uid: str, verb: str) -> Change:
    """It was done."""
    return "delete from op where uid = ? and verb = ?", (uid, verb)


def bury(observation: Observation) -> Change:
    """How it ended, kept for late commands."""
    return (
        "insert or replace into tombstone values (?,?,?,?)",
        (observation.uid, observation.generation, encode(observation), observation.at),
    )


def remove(uid: str) -> list[Change]:
    """Everything about a sandbox but its tombstone, and records that are still to be told."""
    return [
        ("delete from sandbox where uid = ?", (uid,)),
        ("delete from op where uid = ?", (uid,)),
        timerecords.forget(uid),
        (f"delete from exec where uid = ? and {TOLD}", (uid,)),
    ]


def exec_begun(claim: Claim) -> Change:
    """An intent; the first one of an operation id stays."""
    values = (claim.uid, claim.op_id, claim.hash, claim.at, claim.seq, claim.body or None)
    return (
        "insert or ignore into exec (uid, op_id, hash, at, seq, record) values (?,?,?,?,?,?)",
        values,
    )


def exec_whole(claim: Claim, reply: bytes, at: float) -> Change:
    """An operation that has ended before its intent was written."""
    values = (claim.uid, claim.op_id, claim.hash, claim.at, claim.seq, claim.body or None)
    return WHOLE, (*values, reply, at)


def exec_text(uid: str, op_id: str, record: bytes) -> Change:
    """The record of an intent that was kept without."""
    return (
        "update exec set record = ?, told = 0 where uid = ? and op_id = ? and record is null",
        (record, uid, op_id),
    )


def exec_ended(uid: str, op_id: str, reply: bytes, at: float) -> Change:
    """The result of an operation."""
    return (
        "update exec set reply = ?, ended_at = ? where uid = ? and op_id = ?",
        (reply, at, uid, op_id),
    )


def exec_dropped(uid: str, op_id: str, reply: bytes, at: float) -> Change:
    """An operation that was begun and is known not to have run: its id is free again, its
    record is of an id that nobody uses."""
    return (
        "update exec set op_id = hex(randomblob(13)), reply = ?, ended_at = ? "
        "where uid = ? and op_id = ?",
        (reply, at, uid, op_id),
    )


def told(told_to: int, keys: Sequence[tuple[str, int]]) -> list[Change]:
    """The services have the intents, or the results, of these (sandbox, number)."""
    numbers: dict[str, list[int]] = {}
    for uid, seq in keys:
        numbers.setdefault(uid, []).append(seq)
    return [
        (
            f"update exec set told = max(told, ?) where uid = ? and seq in ({_marks(part)})",
            (told_to, uid, *part),
        )
        for uid, seqs in numbers.items()
        for part in (seqs[at : at + SENT_ROWS] for at in range(0, len(seqs), SENT_ROWS))
    ]


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def outbox(row: int, kind: str, data: bytes) -> Change:
    """Something to be published."""
    return OUTBOX, (row, kind, data)


def outbox_sent(rows: Sequence[int]) -> list[Change]:
    """It is stored on the bus."""
    chunks = [tuple(rows[at : at + SENT_ROWS]) for at in range(0, len(rows), SENT_ROWS)]
    return [(f"delete from outbox where id in ({_marks(chunk)})", chunk) for chunk in chunks]


"""Whether nothing of an operation is still to be told."""
def load_sandboxes(db: sqlite3.Connection) -> list[SandboxRow]:
    """All live sandboxes."""
    kept = timerecords.load(db)
    rows = db.execute(
        "select accepted, generation, idle_s, deadline_s, handle, epoch, started_at, paused, "
        "max(seq, coalesce((select max(seq) from exec where exec.uid = sandbox.uid), 0)) "
        "from sandbox"
    )
    found = []
    for accepted, generation, idle_s, deadline_s, handle, epoch, started_at, paused, seq in rows:
        start = decode(accepted, Accepted)
        times = Times(idle_s, deadline_s, start.resolved.spec.scoring_grace_s)
        found.append(SandboxRow(
            start, generation, times, _handle(handle), epoch, started_at, bool(paused), seq,
            kept.get(start.item.uid, Kept()),
        ))  # fmt: skip
    return found


def load_ops(db: sqlite3.Connection) -> list[tuple[str, EdgeOpItem]]:
    """Operations that were not done yet, oldest command first."""
    rows = [(verb, decode(i, EdgeOpItem)) for verb, i in db.execute("select verb, item from op")]
    return sorted(rows, key=lambda row: row[1].generation)


def load_outbox(db: sqlite3.Connection, kind: str) -> list[tuple[int, bytes]]:
    """What was not yet published, oldest first."""
    query = "select id, data from outbox where kind = ? order by id"
    return [(row, bytes(data)) for row, data in db.execute(query, (kind,))]


def last_outbox(db: sqlite3.Connection) -> int:
    """The highest id in use."""
    return int(db.execute("select coalesce(max(id), 0) from outbox").fetchone()[0])


def find_tombstones(db: sqlite3.Connection, uids: Sequence[str]) -> dict[str, Tombstone]:
    """The tombstones of ``uids``."""
    found: dict[str, Tombstone] = {}
    query = "select generation, observation from tombstone where uid = ?"
    for uid in uids:
        row = db.execute(query, (uid,)).fetchone()
        if row:
            found[uid] = Tombstone(row[0], decode(row[1], Observation))
    return found


def begin_exec(db: sqlite3.Connection, claim: Claim) -> ExecRow | None:
    """Records an intent; the row that was there already, if there was one."""
    if db.execute(*exec_begun(claim)).rowcount:
        return None
    return find_exec(db, claim.uid, claim.op_id)


def find_exec(db: sqlite3.Connection, uid: str, op_id: str) -> ExecRow | None:
    """What is known of an operation."""
    query = "select hash, reply, seq, record from exec where uid = ? and op_id = ?"
    row = db.execute(query, (uid, op_id)).fetchone()
    return row and ExecRow(*row)


Told = tuple[str, int, bytes | None, bytes | None, float | None]
"""Sandbox, number, record of the intent, reply, time of the end."""

_RECORD = "select uid, seq, record, reply, ended_at from exec "


def trajectory(db: sqlite3.Connection, uid: str, after: int) -> Iterator[Told]:
    """Operations of a sandbox after a number, in order, read as they are taken."""
    yield from db.execute(_RECORD + "where uid = ? and seq > ? order by seq", (uid, after))


def untold(db: sqlite3.Connection) -> Iterator[Told]:
    """Operations of which the services do not have all yet, oldest first, read as they are
    taken."""
    yield from db.execute(_RECORD + f"where seq > 0 and not {TOLD} order by at, seq")


def exec_keys(db: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    """Sandbox and id of the operations that are kept."""
    yield from db.execute("select uid, op_id from exec")


def _handle_text(handle: Handle) -> str:
    return json.dumps([handle.uid, handle.backend, dict(handle.data), dict(handle.enforcement)])


def _handle(text: str | None) -> Handle | None:
    return Handle(*json.loads(text)) if text else None
