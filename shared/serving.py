"""How a small service comes up and goes: health, bus, database, in one order.

Owns: that order and its reverse. Does not own: the process (:mod:`shared.process`) or
what the service does between.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from shared.bus import Bus
from shared.db import Database
from shared.health import Health
from shared.process import unless_stopped


@contextlib.asynccontextmanager
async def connected(
    stop: asyncio.Event, *, bus: Bus, db: Database, health: Health, port: int
) -> AsyncIterator[bool]:
    """Health answers before the bus is there. ``False``: ``stop`` came before it was.
    Everything is closed in the reverse order at the end."""
    health.add("bus", bus.check)
    health.add("database", db.ping)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(db.close)
        stack.push_async_callback(health.close)
        await health.serve(port)
        stack.push_async_callback(bus.close)
        yield await unless_stopped(stop, bus.start())
