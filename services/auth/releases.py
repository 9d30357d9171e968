"""Giving back what a sandbox was charged when it is over.

Owns: the consumer of terminal events. Does not own: charging
(:mod:`services.auth.handlers`). A charge is one row: whoever removes it gives it back,
in the same transaction, so an event that comes twice gives back once.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.auth import store
from shared.consumer import Received
from shared.db import Database

_PROJECT, _UID = 4, 6
"""Places in the subject ``dsec.evt.v1.sandbox.<project>.<state>.<uid>``."""


class Releases:
    """Handles batches of ``auth_releases``."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def handle(self, batch: Sequence[Received]) -> None:
        """Releases every sandbox named by a terminal event."""
        over = [(p[_PROJECT], p[_UID]) for m in batch if len(p := m.subject.split(".")) == 7]
        await release(self._db, over)


async def release(db: Database, over: Sequence[tuple[str, str]]) -> int:
    """Releases sandboxes, given as project and uid; returns how many were charged."""
    async with db.transaction() as connection:
        paths = await store.paths(connection, {project for project, _ in over})
        chain = {p for path in paths.values() for p in path}
        accounts, _ = await store.lock_accounts(connection, chain)
        gone = await store.release(connection, [uid for _, uid in over])
        for project, sandboxes, millicores, memory_mb in gone:
            for step in paths.get(project, ()):
                added = accounts[step].added
                added[0] -= sandboxes
                added[1] -= millicores
                added[2] -= memory_mb
        await store.save_accounts(connection, accounts.values())
    return sum(row[1] for row in gone)
