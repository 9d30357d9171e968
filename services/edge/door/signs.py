"""Signs of life at the door, of operations and of their clients.

Owns: how often it is looked, when silence is nobody's. Does not own: what a sign is
(:mod:`services.edge.door.operation`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from schemas.exec import HANGUP_S, KEEPALIVE_S
from services.edge.door.finished import Finished, Key
from services.edge.door.operation import Operation
from services.edge.link import Link
from shared.clock import Clock

SILENT_S = KEEPALIVE_S * 0.6
TICK_S = 1.0
STOOD_S = HANGUP_S / 4
"""Later than this a look finds that this process stood still: what clients said meanwhile
is not read yet."""


async def signs_of_life(
    running: Mapping[Key, Operation], finished: Finished, link: Link, clock: Clock
) -> None:
    """Until cancelled. After an outage of the bus, or of this process, every client was
    silent: none has hung up."""
    looked_at = clock.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        before, looked_at = looked_at, clock.monotonic()
        deaf = looked_at - before > STOOD_S or not link.is_up
        for op in list(running.values()):
            await op.keep_alive(SILENT_S, deaf=deaf)
        finished.expire()
