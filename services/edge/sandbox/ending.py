"""How a sandbox's work is interrupted by its end.

Owns: racing a driver call against an ending and a deadline. Does not own: what ends
a sandbox, or what follows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from shared import lifecycle
from shared.errors import DsecError, SandboxDied

log = logging.getLogger(__name__)

CANCEL_S = 10.0
"""A driver that ignores cancellation for longer is logged, again and again."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sandbox is to end and how that will be observed."""

    observed: Literal["stopped", "failed", "refused"]
    cause: str
    message: str = ""
    error: DsecError | None = None
    grace_s: float = 0.0

    def death(self) -> SandboxDied:
        """The error of a command whose sandbox ends."""
        return SandboxDied(
            f"the sandbox ended: {self.message or self.cause}",
            cause=self.cause, is_infra=lifecycle.is_infra(self.cause),
        )  # fmt: skip


class Interrupted(Exception):
    """An ending came first."""


class Fate:
    """Holds the ending of one sandbox; the first one counts."""

    def __init__(self) -> None:
        self.ending: Ending | None = None
        self.sealed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def seal(self, ending: Ending) -> None:
        """Ends it, whatever it does now."""
        if self.ending is None:
            self.ending = ending
            self.sealed.set_result(None)

    async def race(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """``work``, unless an ending comes first (``Interrupted``) or time is up
        (``TimeoutError``); then it has been cancelled and has ended. Work that
        finished all the same counts, so that no handle is ever lost."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {task, self.sealed}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await _cancelled(task)
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
            raise
        if not task.cancelled() and task.exception() is None:
            return task.result()
        if self.ending is not None:
            raise Interrupted
        if task.cancelled():
            raise TimeoutError
        raise task.exception() or AssertionError

    async def outlast(self, work: Awaitable[Any], timeout_s: float) -> None:
        """Waits for ``work`` until it has ended, the sandbox ends or time is up. Raises
        what it raises."""
        waiter = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[Any]] = {self.sealed, waiter}
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if waiter.done():
                waiter.result()
        finally:
            waiter.cancel()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    task.cancel()
    while not task.done():
        await asyncio.wait({task}, timeout=CANCEL_S)
        if not task.done():
            log.error("a driver ignores the cancellation of %r", task)
