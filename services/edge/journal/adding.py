"""Changes of the journal, put into as few statements as there can be.

Owns: which statements add rows in whatever order, how many rows go into one. Does not own:
the statements (:mod:`records`), transactions (:mod:`journal`).

Python gives up its lock for every row that SQLite takes and gets it back only when the
loop's thread lets go of it: two switches between threads for a microsecond of work.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from typing import Any

from services.edge.journal.records import OUTBOX, WHOLE, Change

ADDING = frozenset({WHOLE, OUTBOX})
"""Statements that add a row each, and that commute."""
ROWS = (64, 16, 4, 1)
"""Rows that one statement adds, the largest number first that there are: few forms, so
that SQLite knows each from before."""

Row = tuple[Any, ...]


def apply(db: sqlite3.Connection, changes: Sequence[Change]) -> None:
    """Does ``changes`` in order, but for what is added between two others."""
    rows: dict[str, list[Row]] = {}
    for statement, parameters in changes:
        if statement in ADDING:
            rows.setdefault(statement, []).append(parameters)
            continue
        _add(db, rows)
        db.execute(statement, parameters)
    _add(db, rows)


def together(statement: str, rows: Sequence[Row]) -> Iterator[Change]:
    """The changes that add ``rows`` by one of ``ADDING``."""
    at = 0
    for size in ROWS:
        while len(rows) - at >= size:
            yield _of_many(statement, size), tuple(chain.from_iterable(rows[at : at + size]))
            at += size


@cache
def _of_many(statement: str, size: int) -> str:
    head, values, marks = statement.rpartition("values ")
    return f"{head}{values}{','.join([marks] * size)}"


def _add(db: sqlite3.Connection, rows: dict[str, list[Row]]) -> None:
    for statement, found in rows.items():
        for change in together(statement, found):
            db.execute(*change)
    rows.clear()
