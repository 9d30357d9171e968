"""What the edge knows of commands: intent before, result after.

Owns: the rule that no command begins before its intent would survive this process. Does
not own: the tables (:mod:`records`), the file of intents (:mod:`claims`), what a
repetition is answered (:mod:`door`).

An intent is kept in a slot of :class:`Claims` until the journal, which is told of many at
a time, has committed it; what is found in the slots at the next start goes into the
journal first. So a command waits for no commit.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable

from services.edge import records
from services.edge.claims import Claim, Claims
from services.edge.journal import Journal
from services.edge.records import Change, ExecRow

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Sandbox and operation."""


class Execs:
    """Make it before the journal starts. Without room for the slots' file every intent
    waits for its commit."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._uncommitted: dict[Key, int] = {}
        self._claims: Claims | None = None
        self._reader: sqlite3.Connection | None = None
        try:
            self._claims = Claims(journal.path.with_name(f"{journal.path.name}-claims"))
            self._reader = journal.reader()
        except (OSError, sqlite3.Error) as exc:
            log.warning("every command waits for the journal: %r", exc)
        if self._claims is not None:
            for claim in self._claims.found():
                journal.db.execute(*records.exec_begun(claim))
            self._claims.clear()

    async def find(self, uid: str, op_id: str) -> ExecRow | None:
        """What is known of an operation. Raises ``Unavailable``."""
        return await self._journal.run(lambda db: records.find_exec(db, uid, op_id))

    async def begin(self, uid: str, op_id: str, make: Callable[[], Claim]) -> ExecRow | None:
        """Keeps the intent that ``make`` makes, where nothing is known of the operation;
        else what is known. Raises ``Unavailable``."""
        key = (uid, op_id)
        if self._claims is not None and key not in self._uncommitted and self._is_new(key):
            claim = make()
            if self._claim(self._claims, claim):
                return None
        elif (row := await self.find(uid, op_id)) is not None:
            return row
        else:
            claim = make()
        return await self._journal.run(lambda db: records.begin_exec(db, claim))

    def _claim(self, claims: Claims, claim: Claim) -> bool:
        key = (claim.uid, claim.op_id)
        slot = claims.put(claim)
        if slot is None:
            return False
        self._uncommitted[key] = slot
        change = records.exec_begun(claim)
        try:
            self._journal.post(change, done=lambda: self._release(key, slot))
        except BaseException:
            self._release(key, slot)
            raise
        return True

    def _is_new(self, key: Key) -> bool:
        """Whether the journal has committed nothing of it."""
        try:
            return self._reader is not None and records.find_exec(self._reader, *key) is None
        except sqlite3.Error as exc:
            log.warning("the journal can't be read: %r", exc)
            return False

    def _release(self, key: Key, slot: int) -> None:
        if self._claims is not None and self._uncommitted.get(key) == slot:
            del self._uncommitted[key]
            self._claims.drop(slot)

    def ended(self, uid: str, op_id: str, reply: bytes, at: float) -> Change:
        """The change that keeps a result."""
        return records.exec_ended(uid, op_id, reply, at)

    def dropped(self, uid: str, op_id: str, reply: bytes, at: float) -> Change:
        """The change that has an operation forgotten which is known not to have run; its
        record stays."""
        slot = self._uncommitted.get((uid, op_id))
        if slot is not None:
            self._release((uid, op_id), slot)
        return records.exec_dropped(uid, op_id, reply, at)

    def close(self) -> None:
        """After the journal: what is not committed stays in its slot."""
        if self._claims is not None:
            self._claims.close()
        if self._reader is not None:
            with contextlib.suppress(sqlite3.Error):
                self._reader.close()
