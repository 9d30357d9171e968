"""Whether a sandbox runs or stands still, and how it gets from one to the other.

Owns: the state between ``running`` and ``paused``, that it changes only once the driver
has done it, the reclaim in the background, the sandbox's clock. Does not own: the order
of operations (actor), how a driver freezes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from services.edge.drivers.base import Driver, Handle, Pausable
from services.edge.sandbox.ending import Fate
from services.edge.sandbox.runclock import RunClock
from shared.errors import Conflict, DsecError, Unavailable, Unsupported

log = logging.getLogger(__name__)

PAUSE_S = 30.0
"""Longest pause or resume; then it is undone."""

Standing = Literal["running", "pausing", "paused", "resuming"]


class Pauses:
    """Of one sandbox. ``failed`` is told when memory of a paused one could not be given
    back as it should: then it is to go on."""

    def __init__(
        self, driver: Driver, fate: Fate, clock: RunClock, *, paused: bool,
        failed: Callable[[DsecError], None],
    ) -> None:  # fmt: skip
        self._driver = driver
        self._fate = fate
        self._clock = clock
        self._failed = failed
        self._reclaiming: asyncio.Task[None] | None = None
        self.turn = asyncio.Lock()
        """Held by what changes whether it stands still, or needs it not to change."""
        self.standing: Standing = "paused" if paused else "running"
        self.cause: str | None = None
        """The time limit that paused it, if one did since this process began."""

    async def pause(self, handle: Handle, *, cause: str | None = None) -> None:
        """Raises when it runs on."""
        async with self.turn:
            if self.standing != "paused":
                await self._pause(handle)
                self.cause = cause

    async def _pause(self, handle: Handle) -> None:
        if not isinstance(self._driver, Pausable):
            raise Unsupported("this backend can't pause", field="backend")
        self.standing = "pausing"  # from here commands wait for a resume
        try:
            await self._fate.race(self._driver.pause(handle), PAUSE_S)
        except BaseException:
            self.standing = "running"
            raise
        self._stands(handle, self._driver)

    async def resume(self, handle: Handle) -> None:
        """Raises when it still stands still."""
        async with self.turn:
            await self._resume(handle)

    async def _resume(self, handle: Handle) -> None:
        if self.standing == "running":
            return
        if not isinstance(self._driver, Pausable):
            raise Conflict("the sandbox is paused by a driver that can't resume it")
        self.standing = "resuming"
        try:
            await self.rest()
            await self._fate.race(self._driver.resume(handle), PAUSE_S)
        except BaseException:
            self._stands(handle, self._driver)
            raise
        self.standing, self.cause = "running", None
        self._clock.go()

    async def settle(self, handle: Handle) -> None:
        """Has the driver bring about what the journal says, whatever the edge that was
        killed left half-done. Raises when a sandbox that is to run stands still; one
        that cannot be paused again runs."""
        if not isinstance(self._driver, Pausable):
            return
        if self.standing == "paused":
            try:
                await self._fate.race(self._driver.pause(handle), PAUSE_S)
            except (DsecError, TimeoutError) as exc:
                log.warning("sandbox %s cannot be paused again: %r", handle.uid, exc)
                self.standing = "running"
            else:
                self._stands(handle, self._driver)
                return
        await self._fate.race(self._driver.resume(handle), PAUSE_S)

    def _stands(self, handle: Handle, driver: Pausable) -> None:
        self.standing = "paused"
        self._clock.stop()
        self._reclaiming = asyncio.create_task(self._reclaim(handle, driver))

    async def _reclaim(self, handle: Handle, driver: Pausable) -> None:
        try:
            await driver.reclaim(handle)
        except DsecError as exc:
            log.error("sandbox %s goes on: %s", handle.uid, exc.message)
            self._failed(exc)
        except Exception:
            log.exception("memory of %s is not given back", handle.uid)

    async def rest(self) -> None:
        """Ends the reclaim, with limits as before."""
        task, self._reclaiming = self._reclaiming, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
            await asyncio.wait({task})


Order = Literal["wake", "halt", "go"]
"""Of whoever asks at the door: a resume for an operation, a pause, a resume."""


class Asks:
    """One change for all who ask for the same. ``order`` has it done in turn."""

    def __init__(self, order: Callable[[Order], None]) -> None:
        self._order = order
        self._asked: dict[str, asyncio.Future[None]] = {}

    def ask(self, what: Order) -> asyncio.Future[None]:
        """Done when it is so; of a ``wake`` the failure is ``Unavailable``. Raises
        ``Unavailable`` when too much waits."""
        asked = self._asked.get(what)
        if asked is None:
            self._order(what)
            asked = self._asked[what] = asyncio.get_running_loop().create_future()
            asked.add_done_callback(_heard)
        return asked

    def done(self, what: str, error: DsecError | None) -> None:
        """It had its turn, with this outcome."""
        asked = self._asked.pop(what, None)
        if asked is None:
            return
        if error is None:
            asked.set_result(None)
        elif what == "wake":
            text = f"the sandbox cannot be resumed: {error.message}"
            asked.set_exception(Unavailable(text, retry_after_s=0.5))
        else:
            asked.set_exception(error)


def _heard(asked: asyncio.Future[None]) -> None:
    """A failure that nobody waited for is told by the observation."""
    if not asked.cancelled():
        asked.exception()
