"""A layer of what a sandbox changed: the verb ``pack``, asked for by imagesvc.

Owns: the capture in turn with pauses and the sandbox's end, its release on every way out,
deadlines. Does not own: copying (driver), packing, names and who may ask (imagesvc, auth).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from schemas.control import PackReply, PackRequest
from services.edge.drivers.offers import offered
from services.edge.drivers.snapshotting import Captured, Snapshotting
from services.edge.sandbox.ending import Interrupted
from services.edge.snapshots import packing, scrub
from shared.errors import Unavailable, Unsupported

if TYPE_CHECKING:
    from services.edge.sandbox.actor import Sandbox

T = TypeVar("T")

CAPTURE_S = 600.0
"""Longest copy of a writable layer."""
PACKING = ThreadPoolExecutor(2, "packing")
"""Layers written at once; each may take a core."""


class Cancelled(Exception):
    """Nobody waits for the layer any more."""


async def capture(sandbox: Sandbox, id: str) -> Captured:
    """A copy of what it changed, to be released; it goes on as it was. Raises
    ``Unsupported``, ``SandboxDied``, ``Unavailable`` or ``CapacityExhausted``."""
    driver = snapshotting(sandbox)
    await sandbox.found()
    handle = sandbox.present()
    async with sandbox.pauses.turn:
        return await _raced(sandbox, driver.capture(handle, id))


def snapshotting(sandbox: Sandbox) -> Snapshotting:
    """Its driver as one that takes snapshots. Raises ``Unsupported``."""
    driver = offered(sandbox.driver, Snapshotting)
    if driver is None:
        raise Unsupported(f"backend {sandbox.backend} takes no snapshots", field="backend")
    return driver


async def _raced(sandbox: Sandbox, work: Coroutine[Any, Any, T]) -> T:
    try:
        return await sandbox.fate.race(work, CAPTURE_S)
    except Interrupted:
        assert sandbox.ending is not None
        raise sandbox.ending.death() from None
    except TimeoutError:
        raise Unavailable(f"its changes were not copied within {CAPTURE_S:g} s") from None


async def run_pack(sandbox: Sandbox, request: PackRequest, op: object) -> PackReply:
    """See :class:`schemas.exec.PackRequest`."""
    rules = (*(scrub.RULES if request.scrub else ()), *scrub.extra(request.remove))
    driver = snapshotting(sandbox)
    captured = await capture(sandbox, request.op_id)
    spec = sandbox.accepted.resolved.spec
    folders = [Path(folder) for folder in captured.folders]
    leave_out = packing.Scrub(rules, Path(captured.root) if request.scrub else None)
    scratch = folders[-1].with_name("layer")
    try:
        packed = await _thread(
            lambda tick: packing.pack(
                folders, request.target, leave_out=leave_out, scratch=scratch, tick=tick
            )
        )
    finally:
        await asyncio.shield(driver.release(captured.id))
    return PackReply(
        op_id=request.op_id, manifest=msgspec.to_builtins(packed.manifest),
        frozen_s=captured.frozen_s, removed=packed.report.removed,
        removed_count=packed.report.count, spec=spec,
    )  # fmt: skip


async def _thread(work: Callable[[Callable[[int], None]], T]) -> T:
    """Runs ``work(tick)`` off the loop. Its folders are in use until it has ended, so a
    cancelled caller goes on only then."""
    stop = threading.Event()

    def tick(_done: int) -> None:
        if stop.is_set():
            raise Cancelled

    job = asyncio.get_running_loop().run_in_executor(PACKING, work, tick)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait({job})
        raise
