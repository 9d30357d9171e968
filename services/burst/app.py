"""Puts burst together: heartbeats in, plans out."""

from __future__ import annotations

import asyncio

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
from shared.periodic import Periodic
from shared.serving import connected

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
        connected=lambda: bus.client.is_connected,
    )  # fmt: skip
    bus.listen(hb("*"), Heartbeat, handlers.heartbeat)
    rounds = Periodic("burst rounds", handlers.round, every_s=settings.burst_every_s)
    health.add("rounds", handlers.check)
    health.count("outbox_given_up", lambda: outbox.given_up)
    port = settings.health_port
    async with connected(stop, bus=bus, db=db, health=health, port=port) as up:
        if not up:
            return
        outbox.start()
        rounds.start()
        try:
            await bus.serve(stop)
        finally:
            await rounds.close()
            await outbox.close()
