"""Changes of the journal in few statements: nothing is lost, order holds where it matters."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.journal import records
from services.edge.journal.adding import ROWS, apply, together
from services.edge.journal.claims import Claim

UID = "0" * 26


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    made = sqlite3.connect(":memory:", isolation_level=None)
    made.executescript(records.SCHEMA)
    yield made
    made.close()


def whole(number: int) -> records.Change:
    claim = Claim(UID, f"{number:026d}", bytes(32), float(number), number, b"{}")
    return records.exec_whole(claim, f"reply {number}".encode(), number + 0.5)


MOST = ROWS[0]


@given(st.integers(0, 5 * MOST))
def test_every_row_is_in_one_of_the_statements(count: int) -> None:
    rows = [(number, "access", b"") for number in range(count)]
    changes = list(together(records.OUTBOX, rows))
    flat = [value for _, parameters in changes for value in parameters]
    assert flat == [value for row in rows for value in row]
    assert all(statement.count("?") == len(given) for statement, given in changes)
    assert len({statement for statement, _ in changes}) <= len(ROWS)
    assert len(changes) <= count // MOST + 3 * (len(ROWS) - 1)


@pytest.mark.parametrize("count", [1, MOST - 1, MOST, 2 * MOST + 1])
def test_what_is_added_together_is_what_is_added_one_by_one(
    db: sqlite3.Connection, count: int
) -> None:
    changes = [c for n in range(count) for c in (whole(n), records.outbox(n, "access", b"x"))]
    apply(db, changes)
    found = db.execute("select op_id, reply, seq, ended_at from exec order by seq").fetchall()
    assert found == [(f"{n:026d}", f"reply {n}".encode(), n, n + 0.5) for n in range(count)]
    assert [row for row, _ in records.load_outbox(db, "access")] == list(range(count))


def test_what_comes_after_a_row_finds_it_and_what_comes_before_does_not(
    db: sqlite3.Connection,
) -> None:
    """An operation that did not run frees its id, then it runs; what was published is
    deleted after it was added."""
    dropped = records.exec_dropped(UID, f"{1:026d}", b"busy", 1.0)
    first, again = whole(1), whole(1)
    sent = records.outbox_sent([7])
    apply(db, [first, records.outbox(7, "access", b"x"), dropped, *sent, again])
    found = records.find_exec(db, UID, f"{1:026d}")
    assert found is not None
    assert found.reply == b"reply 1"
    assert db.execute("select count(*) from exec where reply = ?", (b"busy",)).fetchone() == (1,)
    assert records.load_outbox(db, "access") == []


def test_the_first_intent_of_an_id_stays_among_many(db: sqlite3.Connection) -> None:
    other = Claim(UID, f"{3:026d}", b"h" * 32, 9.0, 99)
    apply(db, [*map(whole, range(MOST)), records.exec_whole(other, b"late", 9.0)])
    found = records.find_exec(db, UID, f"{3:026d}")
    assert found is not None
    assert (found.reply, found.seq) == (b"reply 3", 3)
