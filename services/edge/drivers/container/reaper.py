"""Removal of ended containers in the background.

Owns: the queue of containers that only exist in the engine's books any more (their
processes, mounts, groups and files are gone). Does not own: ending them. The engine
needs tens of milliseconds for a removal; nobody should wait for it. What a dying edge
leaves in the queue is found again by its label.
"""

from __future__ import annotations

import asyncio
import logging

from services.edge.drivers.container.engine import Engine
from services.edge.drivers.container.settings import ContainerSettings
from shared.errors import DsecError

log = logging.getLogger(__name__)

RETRY_S = 0.2


class Reaper:
    """``removals_max`` containers may wait; then :meth:`remove` waits too."""

    def __init__(self, settings: ContainerSettings, engine: Engine) -> None:
        self._settings = settings
        self._engine = engine
        self._queue: asyncio.Queue[str] = asyncio.Queue(settings.removals_max)
        self._workers: list[asyncio.Task[None]] = []

    def open(self) -> None:
        self._workers = [
            asyncio.ensure_future(self._work()) for _ in range(self._settings.removal_concurrency)
        ]

    async def remove(self, container_id: str) -> None:
        await self._queue.put(container_id)

    async def idle(self) -> None:
        """Returns when nothing waits any more."""
        await self._queue.join()

    async def _work(self) -> None:
        while True:
            container_id = await self._queue.get()
            try:
                await self._remove(container_id)
            finally:
                self._queue.task_done()

    async def _remove(self, container_id: str) -> None:
        for attempt in range(self._settings.removal_attempts):
            try:
                await self._engine.remove(container_id)
                return
            except DsecError as err:
                log.warning("container %s is not removed yet: %s", container_id[:12], err)
                await asyncio.sleep(RETRY_S * 2**attempt)

    async def close(self) -> None:
        """Finishes what waits, within the engine's own deadline, and ends."""
        if self._workers:
            try:
                async with asyncio.timeout(self._settings.engine_s):
                    await self._queue.join()
            except TimeoutError:
                log.warning("%d containers are left to the next sweep", self._queue.qsize())
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
