"""Puts burst together: heartbeats in, plans out."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import AsyncExitStack

from schemas.node import Heartbeat, Resources
from schemas.subjects import hb
from services.burst import providers
from services.burst.handlers import Handlers
from services.burst.planner import Rule
from services.burst.settings import Settings
from services.burst.store import Store
from shared.bus import Bus
from shared.clock import SystemClock
from shared.db import Database
from shared.errors import InvalidRequest
from shared.health import Health
from shared.outbox import Outbox
from shared.process import unless_stopped

SCHEMA = "burst"


def rule(settings: Settings) -> Rule:
    """The planner's rule. Raises ``InvalidRequest`` for one that cannot be."""
    node = Resources(
        cores=settings.burst_node_cores,
        memory_mb=settings.burst_node_memory_mb,
        sandboxes=settings.burst_node_sandboxes,
    )
    try:
        return Rule(
            threshold=settings.burst_threshold, floor=settings.burst_floor,
            max_share=settings.burst_max_share, max_nodes=settings.burst_max_nodes, node=node,
        )  # fmt: skip
    except ValueError as exc:
        raise InvalidRequest(str(exc), field="burst_threshold") from exc


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Serves until ``stop``. Health answers before the bus is there."""
    bus, db, health = Bus(settings, "burst"), Database(settings.pg_dsn, SCHEMA), Health("burst")
    outbox = Outbox(bus, db)
    handlers = Handlers(
        Store(db, outbox, keep_s=settings.burst_keep_s),
        providers.make(settings.burst_provider), rule(settings), SystemClock(),
        silent_s=settings.burst_silent_s, repeat_s=settings.burst_publish_s,
    )  # fmt: skip
    bus.listen(hb("*"), Heartbeat, handlers.heartbeat)
    for name, check in (("bus", bus.check), ("database", db.ping), ("rounds", handlers.check)):
        health.add(name, check)
    health.count("outbox_given_up", lambda: outbox.given_up)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(db.close)
        stack.push_async_callback(health.close)
        await health.serve(settings.health_port)
        stack.push_async_callback(bus.close)
        if not await unless_stopped(stop, bus.start()):
            return
        outbox.start()
        stack.push_async_callback(outbox.close)
        rounds = asyncio.create_task(handlers.run(settings.burst_every_s), name="burst rounds")
        try:
            await bus.serve(stop)
        finally:
            rounds.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await rounds
