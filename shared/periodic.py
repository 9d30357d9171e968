"""Work that is done again and again in the background.

Owns: the loop, its pauses, and that no error ends it. Does not own: the work. An
outage (a typed error) is logged in one line, anything else with its traceback.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from shared.errors import DsecError

log = logging.getLogger(__name__)


async def portions(portion: Callable[[], Awaitable[int]], *, size: int, most: int = 64) -> int:
    """Calls ``portion``, which does up to ``size`` things and returns how many, until
    nothing is left, at most ``most`` times; returns the sum."""
    total = 0
    for _ in range(most):
        done = await portion()
        total += done
        if done < size:
            break
    return total


AT_REST = 3.0
"""A call that was asked for begins so many times the last call's time after that one's end:
however often it is asked for, the work is done for a quarter of the time at most."""


class Periodic:
    """Calls ``work`` every ``every_s`` seconds, counted from the end of the last call,
    from :meth:`start` to :meth:`close`. ``at_once``: also right at the start; ``soon``: set
    by whoever wants a call before its time."""

    def __init__(
        self, name: str, work: Callable[[], Awaitable[object]], *, every_s: float,
        at_once: bool = True, outage: int = logging.WARNING, soon: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self._work = work
        self._every_s = every_s
        self._at_once = at_once
        self._outage = outage
        self._soon = soon or asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def start(self) -> None:
        """Begins in the background."""
        self._closed = False
        self._task = asyncio.create_task(self._run(), name=self.name)

    async def close(self) -> None:
        """Ends; a call at work is cancelled."""
        self._closed = True  # a library on the way may turn a cancellation into an error
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        if not self._at_once:
            await asyncio.sleep(self._every_s)
        while not self._closed:
            begun = time.monotonic()
            self._soon.clear()
            try:
                await self._work()
            except DsecError as exc:
                log.log(self._outage, "%s: %s", self.name, exc.message)
            except Exception:
                log.exception("%s", self.name)
            if not self._closed:
                await self._rest(time.monotonic() - begun)

    async def _rest(self, took_s: float) -> None:
        least_s = min(self._every_s, AT_REST * took_s)
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._every_s - least_s):
                await self._soon.wait()
