"""How a service's process runs: logging, the event loop, signals, a bounded end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from shared import telemetry
from shared.errors import DsecError
from shared.settings import Common, load

CANCEL_S = 2.0
"""How long a cancelled task may take to end."""
GC_THRESHOLDS = (20_000, 20, 50)
"""Objects made before the youngest are searched for cycles; such searches before the
next older generation's."""

Main = Callable[[asyncio.Event], Awaitable[None]]
S = TypeVar("S", bound=Common)


def configured(service: str, type_: type[S]) -> S:
    """The settings from the environment; ends the process with one line that names
    the variable at fault."""
    try:
        return load(type_)
    except DsecError as exc:
        sys.exit(f"{service}: {exc.message}")


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, Any]) -> bool:
    """Runs ``work`` to its end and returns true, or cancels it when ``stop`` is set
    and returns false: a start that waits for an absent server must still end."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        for future in (task, stopping):
            future.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


def run(service: str, settings: Common, main: Main) -> None:
    """Runs ``main(stop)`` until it returns; SIGTERM and SIGINT set ``stop``. After
    ``settings.shutdown_s`` more seconds the process ends anyway."""
    logging.basicConfig(
        level=settings.log_level,
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {service} %(name)s: %(message)s",
    )
    logging.getLogger("nats").setLevel(logging.ERROR)
    telemetry.setup(service, settings.trace_file)
    _calm_collector()
    try:
        uvloop.run(_supervised(settings, main))
    except DsecError as exc:
        sys.exit(f"{service}: {exc.message}")
    finally:
        telemetry.shutdown()


def _calm_collector() -> None:
    """What was imported is never garbage, and hardly anything else is part of a cycle:
    with CPython's own thresholds the search for it took an eighth of a busy edge's time,
    with pauses that grew with everything the process remembers."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _supervised(settings: Common, main: Main) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    work = asyncio.ensure_future(main(stop))
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        await asyncio.wait({work}, timeout=settings.shutdown_s)
    if not work.done():
        logging.getLogger(__name__).error("did not end in %g s", settings.shutdown_s)
        work.cancel()
        await asyncio.wait({work}, timeout=CANCEL_S)
    await _end_others(work)
    if work.done() and not work.cancelled():
        work.result()


async def _end_others(work: asyncio.Future[None]) -> None:
    """Cancels what still runs. A task that will not end must not keep the process."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    _, left = await asyncio.wait(others, timeout=CANCEL_S) if others else (set(), set())
    if left:
        names = ", ".join(sorted(task.get_name() for task in left))
        logging.getLogger(__name__).error("left behind at the end: %s", names)
        failed = work.done() and not work.cancelled() and work.exception() is not None
        telemetry.shutdown()
        logging.shutdown()
        os._exit(1 if failed else 0)
