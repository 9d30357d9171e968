"""The nodes as this scheduler sees them between two looks at the database.

Owns: the snapshot (node rows + load view), its refresh, the overlay of own
placements. Does not own: the decision (``placement``) or the truth (``nodes``). A
stale or empty snapshot costs a second look under locks, never a wrong placement.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from schemas.node import Heartbeat
from services.scheduler import nodes
from services.scheduler.nodes import Node
from services.scheduler.placement import Amounts, NodeView, Overlay
from shared.db import Database
from shared.errors import Unavailable
from shared.loadview import LoadView
from shared.periodic import Periodic

log = logging.getLogger(__name__)


def pressure_of(beat: Heartbeat | None) -> float:
    """The worst measured share of a node, 0…1."""
    if beat is None:
        return 0.0
    shares = [0.0, *beat.pressure.values()]
    if beat.capacity.memory_mb:
        shares.append(beat.used.memory_mb / beat.capacity.memory_mb)
    if beat.capacity.cores:
        shares.append(beat.used.cores / beat.capacity.cores)
    return min(1.0, max(shares))


class Fleet(Periodic):
    """Snapshot and overlay. What burst asks for counts for ``share_s`` seconds: a burst
    that is dead must not send creations into a cloud that nobody watches."""

    def __init__(
        self, db: Database, load: LoadView, refresh_s: float, *, share_s: float
    ) -> None:
        self._db = db
        self._load_view = load
        self._nodes: list[Node] = []
        self._load: Mapping[str, Heartbeat] = {}
        self._extra: Amounts = {}
        self._overlay = Overlay()
        self._looking = asyncio.Lock()
        super().__init__("fleet", self.refresh, every_s=refresh_s)
        self._share, self._share_until = 0.0, 0.0
        self._share_s = share_s
        self.load_known = False

    def burst(self, share: float) -> None:
        """Burst asks for a portion (0…1) of eligible creations to go to the cloud."""
        self._share = min(1.0, max(0.0, share))
        self._share_until = time.monotonic() + self._share_s

    @property
    def cloud_share(self) -> float:
        """What burst asks for, 0 where it has been silent for too long."""
        if self._share and time.monotonic() >= self._share_until:
            log.warning("burst is silent: nothing is sent to the cloud first any more")
            self._share = 0.0
        return self._share

    def views(self) -> list[NodeView]:
        """Fresh values to place on: the snapshot plus what is not in it yet."""
        found = self.exact(self._nodes)
        by_id = {v.id: v for v in found}
        for node, (cores, memory_mb, count) in self._extra.items():
            if node in by_id:
                by_id[node].add(cores, memory_mb, count)
        return found

    def exact(self, rows: list[Node]) -> list[NodeView]:
        """Values of locked rows: committed amounts are as they are there."""
        out = []
        for row in rows:
            beat = self._load.get(row.id)
            refusing = ""
            if beat is not None and beat.epoch == row.epoch and not beat.admitting:
                refusing = beat.refusing or nodes.REFUSING
            out.append(row.view(pressure_of(beat), refusing))
        return out

    def room(self, cores: float, memory_mb: int) -> bool:
        """Whether any node would take a sandbox of this size now."""
        return any(v.ready and v.fits(cores, memory_mb) for v in self.views())

    def begin(self, amounts: Amounts) -> int:
        """Counts placements that are about to be written."""
        key = self._overlay.begin(amounts)
        self._count(amounts)
        return key

    def commit(self, key: int) -> None:
        """They are written."""
        self._overlay.commit(key, time.monotonic())

    def abort(self, key: int) -> None:
        """They came to nothing."""
        self._overlay.abort(key)

    def given_back(self, amounts: Amounts) -> None:
        """What nodes have free again, negative: written just now."""
        self.commit(self.begin(amounts))

    def _count(self, amounts: Amounts) -> None:
        for node, (cores, memory_mb, count) in amounts.items():
            c, m, n = self._extra.get(node, (0.0, 0, 0))
            self._extra[node] = (c + cores, m + memory_mb, n + count)

    async def refresh(self) -> None:
        """Looks at the database, and at the load view where there is one."""
        async with self._looking:  # what was read first must not come last
            await self._look()

    async def _look(self) -> None:
        begun_at = time.monotonic()
        async with self._db.transaction() as connection:
            rows = await nodes.every(connection)
        self._nodes = rows
        self._extra = self._overlay.snapshot(begun_at)
        try:
            self._load = await self._load_view.read()
            self.load_known = True
        except Unavailable as exc:
            if self.load_known:
                log.warning("placement without measured load: %s", exc.message)
            self._load, self.load_known = {}, False

    def load(self) -> Mapping[str, Heartbeat]:
        """The last load view read."""
        return self._load
