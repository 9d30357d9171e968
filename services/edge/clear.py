"""``python -m services.edge clear``: ends what a node has left, when nobody is there to.

Owns: the order. Does not own: what a leftover is (each driver's ``sweep``). An edge that
starts again on the same state finds that its sandboxes are gone, and says so.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import IO

from services.edge.app import drivers, lock
from services.edge.drivers.base import Driver, Exited
from services.edge.settings import Settings
from shared.errors import Conflict

log = logging.getLogger(__name__)

LOCK_S = 30.0
"""How long the node's edge may take to end."""
LOOK_S = 0.1
SWEEP_S = 60.0
"""Longest work on one driver."""


async def clear(settings: Settings) -> list[str]:
    """Waits for the edge to end, then removes every sandbox of the node and what belongs
    to none; returns their uids. Raises ``Conflict`` where an edge still runs."""
    held = await _locked(settings)
    try:
        return await _sweep(drivers(settings).items())
    finally:
        held.close()


async def _locked(settings: Settings) -> IO[str]:
    end = time.monotonic() + LOCK_S
    while True:
        try:
            return lock(settings)
        except Conflict:
            if time.monotonic() > end:
                raise
            await asyncio.sleep(LOOK_S)


async def _sweep(found: Iterable[tuple[str, Driver]]) -> list[str]:
    swept: list[str] = []
    for name, driver in found:
        try:
            async with asyncio.timeout(SWEEP_S):
                await driver.probe()
                await driver.open(_gone)
                swept += await driver.sweep(frozenset())
        except Exception:  # one bad backend must not keep the others' leftovers
            log.exception("driver %s was not cleared", name)
        finally:
            await driver.close()
    log.warning("cleared %d sandboxes: %s", len(swept), ", ".join(swept))
    return swept


async def _gone(exited: Exited) -> None:
    log.debug("%s ended", exited.uid)
