"""Garbage collection: removes layers that nothing needs.

Owns: the order of a round. Does not own: SQL (``leases``), files (the store), which
sandboxes live (the scheduler). A layer goes when no image names it, no import holds a
lease on it, and no living sandbox was started from it, all for at least the set age; in
doubt, as when the scheduler does not answer, it stays.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.image import LayerUse, LayerUseQuery
from schemas.subjects import rpc
from services.imagesvc import leases
from services.imagesvc.settings import Settings
from shared.blobs.base import BlobStore
from shared.bus import Bus
from shared.db import Database

log = logging.getLogger(__name__)

BATCH = 256
"""Layers asked about and locked together: a question of 18 KB."""
ASK_S = 30.0


class Collector:
    """Rounds of collection, one at a time in this process; several processes at once
    take different layers."""

    def __init__(self, settings: Settings, bus: Bus, db: Database, blobs: BlobStore) -> None:
        self._settings = settings
        self._bus = bus
        self._db = db
        self._blobs = blobs

    async def collect(self) -> int:
        """One round over all layers; returns how many went. Raises ``Unavailable``
        where the database, the scheduler or the store is away."""
        removed, after = 0, ""
        while True:
            async with self._db.transaction() as connection:
                found = await leases.candidates(
                    connection, age_s=self._settings.image_gc_age_s, after=after, limit=BATCH
                )
            if not found:
                if removed:
                    log.info("removed %d layers that nothing needs", removed)
                return removed
            after = found[-1]
            removed += await self._remove(
                await self._unused(found), age_s=self._settings.image_gc_age_s
            )

    async def discard(self, digests: list[str]) -> None:
        """Removes, at once, those of a failed import's layers that nothing needs."""
        for start in range(0, len(digests), BATCH):
            await self._remove(await self._unused(digests[start : start + BATCH]), age_s=0.0)

    async def _unused(self, digests: list[str]) -> list[str]:
        answer = await self._bus.request(
            rpc("scheduler", "layers"), LayerUseQuery(digests=digests), LayerUse, timeout_s=ASK_S
        )
        used = set(answer.used)
        return [digest for digest in digests if digest not in used]

    async def _remove(self, digests: list[str], *, age_s: float) -> int:
        async with self._db.transaction() as connection:
            free = await leases.lock_free(connection, digests, age_s=age_s)
            for digest in free:
                await asyncio.to_thread(self._blobs.delete, digest)
            await leases.forget(connection, free)
        return len(free)


