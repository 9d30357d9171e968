"""What the edge knows of commands: intent before, result after.

Owns: the rule that no command begins before its intent would survive this process. Does
not own: the tables (:mod:`records`), the file of intents (:mod:`claims`), what a
repetition is answered (:mod:`door`).

An intent is kept in a slot of :class:`Claims` until the journal, which is told of many at
a time, has committed it; what is found in the slots at the next start goes into the
journal first. So a command waits for no commit, and most have ended before the journal is
told: those are written once, intent and result together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.edge.journal import records
from services.edge.journal.claims import Claim, Claims
from services.edge.journal.journal import Journal
from services.edge.journal.pruning import MAX_EXECS, SHED_EXECS
from services.edge.journal.records import Change, ExecRow
from shared.errors import Unavailable

log = logging.getLogger(__name__)

KNOWN_EXECS = MAX_EXECS + 10 * SHED_EXECS
"""More than the journal keeps, also while it is about to drop some."""
KNOWN_BITS = 1 << 24
TELL_S = 0.25
"""How long an intent may be in its slot alone."""

Key = tuple[str, str]
"""Sandbox and operation."""
Done = Callable[[], None] | None
"""To be called once a change is committed."""


@dataclass(slots=True)
class _Uncommitted:
    """An intent in a slot."""

    slot: int
    claim: Claim


class _Known:
    """Which operations may have been begun: all that the journal keeps. To be taken for
    another costs a question to the journal, so that a bit for each does, at the place that
    its hash says: of new ones one in twenty asks in vain, and 300,000 take 4 MiB."""

    def __init__(self, keys: Iterable[Key]) -> None:
        self._new, self._old = bytearray(KNOWN_BITS // 8), bytearray(KNOWN_BITS // 8)
        self._count = 0  # of the new ones
        for key in keys:
            self.adds(key)

    def adds(self, key: Key) -> bool:
        """Whether it is new, from now on no more."""
        place = hash(key) % KNOWN_BITS
        byte, bit = place >> 3, 1 << (place & 7)
        if (self._new[byte] | self._old[byte]) & bit:
            return False
        self._new[byte] |= bit
        self._count += 1
        if self._count > KNOWN_EXECS:
            self._old, self._new = self._new, bytearray(KNOWN_BITS // 8)
            self._count = 0
        return True


class Execs:
    """Make it before the journal starts. Without room for the slots' file every intent
    waits for its commit."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._uncommitted: dict[Key, _Uncommitted] = {}
        self._untold: dict[Key, _Uncommitted] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._claims: Claims | None = None
        try:
            self._claims = Claims(journal.path.with_name(f"{journal.path.name}-claims"))
        except OSError as exc:
            log.warning("every command waits for the journal: %r", exc)
        if self._claims is not None:
            for claim in self._claims.found():
                journal.db.execute(*records.exec_begun(claim))
            self._claims.clear()
        self._known = _Known(records.exec_keys(journal.db))

    async def find(self, uid: str, op_id: str) -> ExecRow | None:
        """What is known of an operation. Raises ``Unavailable``."""
        self.tell()
        return await self._journal.run(lambda db: records.find_exec(db, uid, op_id))

    async def begin(
        self, uid: str, op_id: str, make: Callable[[], Claim], *, again: bool = False
    ) -> ExecRow | None:
        """Keeps the intent that ``make`` makes, where nothing is known of the operation;
        else what is known. ``again``: its client has heard of it before, or believes so: then
        the journal is asked in any case. Raises ``Unavailable``."""
        key = (uid, op_id)
        if self._claims is not None and self._known.adds(key) and not again:
            claim = make()
            if self._claim(self._claims, claim):
                return None
        elif (row := await self.find(uid, op_id)) is not None:
            return row
        elif (begun := self._uncommitted.get(key)) is not None:  # its end could not be written
            return ExecRow(begun.claim.hash, None, begun.claim.seq, begun.claim.body or None)
        else:
            claim = make()
        self.tell()
        return await self._journal.run(lambda db: records.begin_exec(db, claim))

    def _claim(self, claims: Claims, claim: Claim) -> bool:
        slot = claims.put(claim)
        if slot is None:
            return False
        key = (claim.uid, claim.op_id)
        self._uncommitted[key] = self._untold[key] = _Uncommitted(slot, claim)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(TELL_S, self._tell_in_time)
        return True

    def _tell_in_time(self) -> None:
        self._telling = None
        with contextlib.suppress(Unavailable):  # they stay in their slots
            self.tell()

    def tell(self) -> None:
        """Has the journal write what it was not told of. Raises ``Unavailable``."""
        for key, begun in list(self._untold.items()):
            self._journal.post(records.exec_begun(begun.claim), done=self._releases(key, begun))
            del self._untold[key]

    def _releases(self, key: Key, begun: _Uncommitted) -> Callable[[], None]:
        return lambda: self._release(key, begun)

    def _release(self, key: Key, begun: _Uncommitted) -> None:
        if self._claims is not None and self._uncommitted.get(key) is begun:
            del self._uncommitted[key]
            self._claims.drop(begun.slot)

    def ended(self, uid: str, op_id: str, reply: bytes, at: float) -> tuple[list[Change], Done]:
        """The changes that keep a result, and what to call once they are committed. They
        are to be posted before anything else is asked of this operation."""
        begun = self._untold.pop((uid, op_id), None)
        if begun is None:
            return [records.exec_ended(uid, op_id, reply, at)], None
        whole = records.exec_whole(begun.claim, reply, at)
        return [whole], self._releases((uid, op_id), begun)

    def dropped(self, uid: str, op_id: str, reply: bytes, at: float) -> tuple[list[Change], Done]:
        """As :meth:`ended`, the changes that have an operation forgotten which is known not
        to have run; its record stays."""
        key = (uid, op_id)
        untold = self._untold.pop(key, None)
        if (begun := self._uncommitted.get(key)) is not None:
            self._release(key, begun)
        first = [records.exec_begun(untold.claim)] if untold is not None else []
        return [*first, records.exec_dropped(uid, op_id, reply, at)], None

    def close(self) -> None:
        """After the journal: what is not committed stays in its slot."""
        if self._telling is not None:
            self._telling.cancel()
        if self._claims is not None:
            self._claims.close()
