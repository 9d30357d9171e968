"""auth's parts, put together, started and ended in order. The only composition root."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from schemas.subjects import DURABLES, Durable
from services.auth import store
from services.auth.access import AccessBuffer
from services.auth.callout import Callout
from services.auth.handlers import Requests
from services.auth.iam import IamDoor
from services.auth.kick import Kicker
from services.auth.reads import Reads
from services.auth.reconcile import Reconciler
from services.auth.releases import Releases
from services.auth.settings import Settings
from shared import inbox
from shared.bus import Bus
from shared.clock import Clock, SystemClock
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.errors import DsecError
from shared.health import Health
from shared.outbox import Outbox

log = logging.getLogger(__name__)

PRUNE_S = 600.0


class App:
    """The service. ``start`` waits for the bus as long as it takes."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        clock = clock or SystemClock()
        self.db = Database(settings.pg_dsn, "auth")
        self.bus = Bus(settings, "auth")
        self.outbox = Outbox(self.bus, self.db)
        self.records = AccessBuffer(self.bus)
        self.kicker = Kicker(settings, self.bus)
        self.callout = Callout(settings, db=self.db, bus=self.bus, clock=clock)
        self.reads = Reads(settings, db=self.db, bus=self.bus, records=self.records, clock=clock)
        iam = IamDoor(
            settings, db=self.db, bus=self.bus, outbox=self.outbox, kicker=self.kicker,
            clock=clock,
        )  # fmt: skip
        requests = Requests(
            settings, db=self.db, bus=self.bus, outbox=self.outbox, iam=iam, clock=clock
        )
        self.requests = BatchConsumer(self.bus, _durable("auth_requests"), requests.handle)
        self.releases = BatchConsumer(
            self.bus, _durable("auth_releases"), Releases(self.db).handle
        )
        self.reconciler = Reconciler(settings, db=self.db, bus=self.bus)
        self.health = Health("auth")
        self.health.add("bus", self.bus.check)
        self.health.add("database", self.db.ping)
        self.health.add("requests", self.requests.check)
        self.health.add("releases", self.releases.check)
        self.health_port = 0
        self._pruning: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connects and begins: connections first, so that others get in."""
        self.health_port = await self.health.serve(self.settings.health_port)
        await self.bus.start()
        await self.callout.start()
        self.outbox.start()
        self.records.start()
        self.kicker.start()
        await self.reads.start()
        self.requests.start()
        self.releases.start()
        self.reconciler.start()
        self._pruning = asyncio.create_task(self._prune(), name="prune")
        log.info("ready")

    async def close(self) -> None:
        """Finishes what is at hand, in the order in which parts need each other."""
        if self._pruning is not None:
            self._pruning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pruning
        await self.reconciler.close()
        await asyncio.gather(self.reads.close(), self.requests.close(), self.releases.close())
        await self.records.close()
        await self.callout.close()
        await self.kicker.close()
        await self.outbox.close()
        await self.bus.close()
        await self.db.close()
        await self.health.close()

    async def _prune(self) -> None:
        while True:
            try:
                async with self.db.transaction() as connection:
                    await inbox.prune(connection)
                    keep_s = self.settings.auth_request_keep_s
                    more = await store.prune_requests(connection, keep_s=keep_s)
            except DsecError as exc:
                log.warning("old requests stay for now: %s", exc.message)
                more = 0
            await asyncio.sleep(0 if more == store.PRUNE_ROWS else PRUNE_S)


def _durable(name: str) -> Durable:
    return next(d for d in DURABLES if d.name == name)


async def run(settings: Settings, stop: asyncio.Event) -> None:
    """Runs the service until ``stop`` is set."""
    app = App(settings)
    try:
        await app.start()
        await stop.wait()
    finally:
        await app.close()
