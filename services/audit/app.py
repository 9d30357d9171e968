"""Puts audit together: consumers into its records, rules over them, answers out of them."""

from __future__ import annotations

import asyncio
from functools import partial

from schemas.streams import durable
from schemas.subjects import rpc
from schemas.trajectory import OutputPiece, OutputQuery, TrajectoryQuery, output_of
from services.audit import judging, owners
from services.audit.correlation import Correlation
from services.audit.engine import Engine
from services.audit.handlers import Handlers
from services.audit.judging import Judge
from services.audit.outputs import Outputs
from services.audit.questions import Questions
from services.audit.settings import Settings
from services.audit.store import Store
from services.audit.trajectory import Trajectories
from shared.bus import Bus
from shared.clock import SystemClock
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.health import Health
from shared.outbox import Outbox
from shared.periodic import Periodic, portions
from shared.serving import connected

SCHEMA = "audit"
QUEUE = "audit"
DAYS_S = 3_600.0
"""Between looks at which days are to be made and which to be dropped."""
PRUNE_S = 300.0
PRUNE_ROWS = 500


class App:
    """One audit."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus, self.health = Bus(settings, "audit"), Health("audit")
        self.db = Database(settings.pg_dsn, SCHEMA)
        self.store = Store(self.db, rows_per_transaction=settings.rows_per_transaction)
        self.outbox = Outbox(self.bus, self.db)
        clock, engine = SystemClock(), Engine(settings.rules())
        self.judge = Judge(engine, settings.choices(), self.outbox)
        handlers = Handlers(
            self.store, judge=self.judge, correlation=Correlation(self.bus, self.db, clock),
            bus=self.bus, clock=clock, root=settings.root_project,
        )  # fmt: skip
        Questions(self.store, engine).answer_on(self.bus, QUEUE)
        trails = Trajectories(
            self.db, keep_s=settings.trajectory_keep_s, max_bytes=settings.trajectory_max_bytes
        )
        self.bus.answer(rpc("audit", "trajectory"), TrajectoryQuery, trails.page, queue=QUEUE)
        outputs = Outputs(self.db)
        self.bus.answer(output_of("*"), OutputPiece, outputs.take, queue=QUEUE)
        self.bus.answer(rpc("audit", "outputs"), OutputQuery, outputs.page, queue=QUEUE)
        self.consumers = [
            BatchConsumer(self.bus, durable("audit_access"), handlers.access),
            BatchConsumer(self.bus, durable("audit_violations"), handlers.violations),
            BatchConsumer(self.bus, durable("audit_reports"), handlers.reports),
            BatchConsumer(self.bus, durable("audit_trajectory"), trails.told),
        ]
        self.periodics = [
            Periodic("days of the record", self._days, every_s=DAYS_S),
            Periodic("old windows and owners", self._prune, every_s=PRUNE_S, at_once=False),
            Periodic("trajectory", trails.forget, every_s=settings.trajectory_look_s),
        ]
        for consumer in self.consumers:
            self.health.add(consumer.name, consumer.check)
        self.health.count("findings", lambda: self.judge.findings)
        self.health.count("outbox_given_up", lambda: self.outbox.given_up)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until ``stop``. Health answers before the bus is there."""
        port = self.settings.health_port
        async with connected(stop, bus=self.bus, db=self.db, health=self.health, port=port) as up:
            if not up:
                return
            self.outbox.start()
            for periodic in self.periodics:
                periodic.start()
            for consumer in self.consumers:
                consumer.start()
            try:
                await self.bus.serve(stop)
            finally:
                await asyncio.gather(*(c.close() for c in self.consumers))
                await asyncio.gather(*(p.close() for p in self.periodics))
                await self.outbox.close()

    async def _days(self) -> None:
        await self.store.keep_days(root=self.settings.root_project)

    async def _prune(self) -> None:
        settings = self.settings
        for prune, keep_s in (
            (judging.prune, settings.audit_window_keep_s), (owners.prune, settings.audit_keep_s),
        ):  # fmt: skip
            once = self.db.portion(partial(prune, keep_s=keep_s, limit=PRUNE_ROWS))
            await portions(once, size=PRUNE_ROWS)


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Runs one audit until ``stop`` is set."""
    await App(settings).run(stop)
