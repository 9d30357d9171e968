"""Faults that a spec's options order: see :mod:`services.edge.drivers.fake.driver`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

from shared.errors import BY_CODE, Internal, Unavailable


async def start_faults(options: Mapping[str, Any]) -> None:
    await asyncio.sleep(float(options.get("start_delay_s", 0.0)))
    if options.get("start_deaf_s"):
        await _deaf(float(options["start_deaf_s"]))
    if options.get("start_hang"):
        await asyncio.Event().wait()
    name = options.get("start_error")
    if name:
        kind = BY_CODE.get(str(name), Internal)
        raise kind(f"start fails by order: {name}", cause=None if name in BY_CODE else name)


async def _deaf(seconds: float) -> None:
    """Sleeps through cancellations, as a call into an engine does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(end - time.monotonic())


async def stop_faults(options: Mapping[str, Any], calls: int) -> None:
    hang, error = options.get("stop_hang"), options.get("stop_error")
    if hang is True or (hang and calls <= int(hang)):
        await asyncio.Event().wait()
    if error and calls <= int(error):
        raise Internal("stop fails by order")


async def pause_faults(options: Mapping[str, Any], calls: int, verb: str) -> None:
    """Of the ``calls``-th pause, resume or reclaim."""
    if calls <= int(options.get(f"{verb}_hang", 0)):
        await asyncio.Event().wait()
    if calls <= int(options.get(f"{verb}_error", 0)):
        raise Unavailable(f"{verb} fails by order", cause="runtime")
