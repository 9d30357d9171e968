"""Compares old charges with the state of their sandboxes, without being told to.

Owns: healing what a lost event would leave charged for ever. Does not own: the usual
way (:mod:`services.auth.releases`). Each look takes a page of charges and asks the
scheduler about them; what is over is released, and so is what the scheduler does not
know after longer than any command may still be on its way.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from operator import itemgetter

from schemas.sandbox import SandboxPage, SandboxQuery
from schemas.subjects import rpc
from services.auth import store
from services.auth.releases import release
from services.auth.settings import Settings
from shared.bus import Bus
from shared.db import Database
from shared.lifecycle import TERMINAL
from shared.periodic import Periodic

log = logging.getLogger(__name__)

PAGE = 500
"""Charges a look."""


class Reconciler(Periodic):
    """Looks at old charges in the background until :meth:`close`."""

    def __init__(self, settings: Settings, *, db: Database, bus: Bus) -> None:
        self._settings = settings
        self._db = db
        self._bus = bus
        self._after = ""
        super().__init__(
            "reconcile charges", self.look, every_s=settings.auth_reconcile_s, at_once=False
        )

    async def look(self) -> int:
        """Takes the next page; returns how many sandboxes were released."""
        async with self._db.transaction() as connection:
            old = await store.old_charges(
                connection, after=self._after, age_s=self._settings.auth_charge_check_s,
                limit=PAGE,
            )  # fmt: skip
        over: list[tuple[str, str]] = []
        for project, rows in itertools.groupby(sorted(old, key=itemgetter(1)), itemgetter(1)):
            over += [(project, uid) for uid in await self._over(project, list(rows))]
        self._after = old[-1][0] if len(old) == PAGE else ""
        released = await release(self._db, over) if over else 0
        if released:
            log.warning("%d sandboxes were over and still charged", released)
        return released

    async def _over(self, project: str, rows: Sequence[tuple[str, str, float]]) -> list[str]:
        uids = [uid for uid, _, _ in rows]
        query = SandboxQuery(uids=uids, project=project, limit=PAGE)
        page = await self._bus.request(rpc("scheduler", "sandboxes"), query, SandboxPage)
        states = {s.uid: s.state for s in page.sandboxes}
        unknown_s = self._settings.auth_charge_unknown_s
        return [
            uid for uid, _, age_s in rows
            if (states[uid] in TERMINAL if uid in states else age_s > unknown_s)
        ]  # fmt: skip
