"""How a service's process runs: logging, the event loop, signals, a bounded end."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable

import uvloop

from shared import telemetry
from shared.errors import DsecError
from shared.settings import Common

Main = Callable[[asyncio.Event], Awaitable[None]]


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
    try:
        uvloop.run(_supervised(settings, main))
    except DsecError as exc:
        sys.exit(f"{service}: {exc.message}")
    finally:
        telemetry.shutdown()


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
        await asyncio.wait({work}, timeout=1.0)
        return
    work.result()
