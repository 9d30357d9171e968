"""auth's parts, put together, started and ended in order. The only composition root."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from schemas.streams import DURABLES, Durable
from services.auth import store
from services.auth.access import AccessBuffer
from services.auth.callout import Callout
from services.auth.handlers import Requests
from services.auth.iam import IamDoor
from services.auth.kick import Kicker
from services.auth.reads import Reads
from services.auth.reconcile import Reconciler
from services.auth.releases import Releases
from services.auth.sealing import Sealer
from services.auth.secrets import Secrets
from services.auth.settings import Settings
from shared import inbox
from shared.bus import Bus
from shared.clock import Clock, SystemClock
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.health import Health
from shared.outbox import Outbox
from shared.periodic import Periodic, portions

log = logging.getLogger(__name__)


class App:
    """The service. ``start`` waits for the bus as long as it takes."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self.settings = settings
        clock = clock or SystemClock()
        self.db = Database(settings.pg_dsn, "auth")
        self.bus = Bus(settings, "auth")
        self.outbox = Outbox(self.bus, self.db)
        self.records = AccessBuffer(self.bus)
        self.callout = Callout(settings, db=self.db, bus=self.bus, clock=clock)
        self.kicker = Kicker(settings, self.bus, forget=self.callout.forget)
        self.kicker.listen()
        secrets = Secrets(
            Sealer(settings.auth_secret_keys), db=self.db, bus=self.bus, clock=clock
        )
        secrets.answer_on(self.bus)
        self.reads = Reads(
            settings, db=self.db, bus=self.bus, records=self.records, clock=clock,
            secrets=secrets,
        )  # fmt: skip
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
        self.health.count("outbox_given_up", lambda: self.outbox.given_up)
        self.health.add("requests", self.requests.check)
        self.health.add("releases", self.releases.check)
        self.health_port = 0
        self.pruning = Periodic("prune", self.prune, every_s=settings.auth_prune_s)

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
        self.pruning.start()
        log.info("ready")

    async def close(self) -> None:
        """Finishes what is at hand, in the order in which parts need each other."""
        await self.pruning.close()
        await self.reconciler.close()
        await asyncio.gather(self.reads.close(), self.requests.close(), self.releases.close())
        await self.records.close()
        await self.callout.close()
        await self.kicker.close()
        await self.outbox.close()
        await self.bus.close()
        await self.db.close()
        await self.health.close()

    async def prune(self) -> int:
        """Removes what is past its use, in small transactions; returns the rows."""
        rows, keep_s = self.settings.auth_prune_rows, self.settings.auth_request_keep_s
        total = 0
        for prune in (inbox.prune, partial(store.prune_requests, keep_s=keep_s)):
            total += await portions(self.db.portion(partial(prune, limit=rows)), size=rows)
        return total


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
