"""Puts audit together: two consumers into one record, one answer out of it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from schemas.audit import AuditQuery
from schemas.subjects import durable, rpc
from services.audit.handlers import Handlers
from services.audit.settings import Settings
from services.audit.store import Store
from shared.bus import Bus
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.health import Health
from shared.process import unless_stopped

SCHEMA = "audit"
QUEUE = "audit"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until ``stop``. Health answers before the bus is there."""
    bus, db, health = Bus(settings, "audit"), Database(settings.pg_dsn, SCHEMA), Health("audit")
    handlers = Handlers(Store(db, rows_per_transaction=settings.rows_per_transaction))
    bus.answer(rpc("audit", "entries"), AuditQuery, handlers.entries, queue=QUEUE)
    access = BatchConsumer(bus, durable("audit_access"), handlers.access)
    violations = BatchConsumer(bus, durable("audit_violations"), handlers.violations)
    for name, check in (
        ("bus", bus.check), ("database", db.ping),
        ("access", access.check), ("violations", violations.check),
    ):  # fmt: skip
        health.add(name, check)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(db.close)
        stack.push_async_callback(health.close)
        await health.serve(settings.health_port)
        stack.push_async_callback(bus.close)
        if not await unless_stopped(stop, bus.start()):
            return
        access.start()
        violations.start()
        try:
            await bus.serve(stop)
        finally:
            await asyncio.gather(access.close(), violations.close())
