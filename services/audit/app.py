"""Puts audit together: consumers into its records, answers out of them."""

from __future__ import annotations

import asyncio

from schemas.audit import AuditQuery
from schemas.subjects import durable, rpc
from schemas.trajectory import TrajectoryQuery
from services.audit.handlers import Handlers
from services.audit.settings import Settings
from services.audit.store import Store
from services.audit.trajectory import Trajectories
from shared.bus import Bus
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.health import Health
from shared.periodic import Periodic
from shared.serving import connected

SCHEMA = "audit"
QUEUE = "audit"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until ``stop``. Health answers before the bus is there."""
    bus, db, health = Bus(settings, "audit"), Database(settings.pg_dsn, SCHEMA), Health("audit")
    handlers = Handlers(Store(db, rows_per_transaction=settings.rows_per_transaction))
    bus.answer(rpc("audit", "entries"), AuditQuery, handlers.entries, queue=QUEUE)
    trails = Trajectories(
        db, keep_s=settings.trajectory_keep_s, max_bytes=settings.trajectory_max_bytes
    )
    bus.answer(rpc("audit", "trajectory"), TrajectoryQuery, trails.page, queue=QUEUE)
    forgetting = Periodic("trajectory", trails.forget, every_s=settings.trajectory_look_s)
    access = BatchConsumer(bus, durable("audit_access"), handlers.access)
    violations = BatchConsumer(bus, durable("audit_violations"), handlers.violations)
    trajectory = BatchConsumer(bus, durable("audit_trajectory"), trails.told)
    consumers = {"access": access, "violations": violations, "trajectory": trajectory}
    for name, consumer in consumers.items():
        health.add(name, consumer.check)
    port = settings.health_port
    async with connected(stop, bus=bus, db=db, health=health, port=port) as up:
        if not up:
            return
        for consumer in consumers.values():
            consumer.start()
        forgetting.start()
        try:
            await bus.serve(stop)
        finally:
            await forgetting.close()
            await asyncio.gather(*(c.close() for c in consumers.values()))
