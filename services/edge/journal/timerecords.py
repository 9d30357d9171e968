"""What of a sandbox's time is journalled beside its limits. The edge's other SQL:
:mod:`services.edge.journal.records`."""

from __future__ import annotations

import sqlite3

from services.edge.sandbox.verifying import Kept, Lease, Scoring

Change = tuple[str, tuple[object, ...]]

SCHEMA = """
create table if not exists timing (
    uid text primary key, scoring_cause text, scoring_at real, asked_at real not null,
    holder text, lease_until real, lease_ends real, alone integer not null
) without rowid;
"""


def keep(uid: str, kept: Kept) -> Change:
    """All of it, in place of what was there."""
    scoring, lease = kept.scoring, kept.lease
    return (
        "insert or replace into timing values (?,?,?,?,?,?,?,?)",
        (
            uid, scoring and scoring.cause, scoring and scoring.at, kept.asked_at,
            lease and lease.holder, lease and lease.until, lease and lease.ends,
            int(lease is not None and lease.alone),
        ),
    )  # fmt: skip


def forget(uid: str) -> Change:
    """The sandbox is over."""
    return "delete from timing where uid = ?", (uid,)


def load(db: sqlite3.Connection) -> dict[str, Kept]:
    """By sandbox; one without a row has nothing to be kept."""
    rows = db.execute(
        "select uid, scoring_cause, scoring_at, asked_at, holder, lease_until, lease_ends, alone "
        "from timing"
    )
    return {
        uid: Kept(
            Scoring(cause, at) if cause is not None else None,
            Lease(holder, until, ends, bool(alone)) if holder is not None else None,
            asked_at,
        )
        for uid, cause, at, asked_at, holder, until, ends, alone in rows
    }
