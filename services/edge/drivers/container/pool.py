"""The pool of warm shells.

Owns: how many shells there are and in which step each is. Does not own: what a shell
is made of (:mod:`services.edge.drivers.container.shells`). Shells that are being made
count like ready ones, so a slow engine never leads to more than the target; those who
wait for one raise the target up to ``pool_max``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from shared.errors import DsecError, Unavailable

log = logging.getLogger(__name__)


REFILL_AFTER_S = 0.25
"""Quiet time after a claim before its shell is replaced: making one costs the engine a
hundred times the CPU of a start, which the starts of a burst need more."""
HALF_EMPTY_S = 0.1
"""A pool that is half empty is filled so long after that, however many claims follow: longer
than sandboxes that are made together take to start."""


class Warm(Protocol):
    """What the pool holds: it can be asked whether it still lives."""

    @property
    def alive(self) -> bool: ...


W = TypeVar("W", bound=Warm)


class Pool(Generic[W]):
    """``make`` yields a ready shell or raises; ``drop`` removes one for good."""

    def __init__(
        self, make: Callable[[], Awaitable[W]], drop: Callable[[W], Awaitable[None]],
        *, size: int, most: int, concurrency: int, retry_s: float,
    ) -> None:  # fmt: skip
        self._make, self._drop = make, drop
        self._size, self._most = size, most
        self._concurrency, self._retry_s = concurrency, retry_s
        self._ready: deque[W] = deque()
        self._waiting: deque[asyncio.Future[W]] = deque()
        self._making: set[asyncio.Task[None]] = set()
        self._on_the_way = 0  # being made, not in the pause after a failure
        self._last_error: DsecError | None = None
        self._open = False
        self._later: asyncio.TimerHandle | None = None
        self._half_empty: asyncio.TimerHandle | None = None

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def making(self) -> int:
        return len(self._making)

    def open(self) -> None:
        self._open = True
        self._fill()

    async def take(self) -> W:
        """A ready shell, the longest waiting first served. Raises ``Unavailable`` when
        the pool is closed, and the failure when the shell that was to come failed."""
        while self._ready and not self._waiting:
            shell = self._ready.popleft()
            if shell.alive:
                self._refill_soon()
                return shell
            self._discard(shell)
        if not self._open:
            raise Unavailable("the pool of shells is closed")
        turn: asyncio.Future[W] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._fill()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._ready.append(turn.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(turn)

    def _refill_soon(self) -> None:
        loop = asyncio.get_running_loop()
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(REFILL_AFTER_S, self._fill)
        few = 2 * (len(self._ready) + len(self._making)) < self._size
        if few and self._half_empty is None:
            self._half_empty = loop.call_later(HALF_EMPTY_S, self._fill)

    def _wait_no_longer(self) -> None:
        for timer in (self._later, self._half_empty):
            if timer is not None:
                timer.cancel()
        self._later = self._half_empty = None

    def last_error(self) -> DsecError | None:
        return self._last_error

    def _fill(self) -> None:
        self._wait_no_longer()
        if not self._open:
            return
        target = min(self._size + len(self._waiting), self._most)
        room = min(
            target - len(self._ready) - len(self._making), self._concurrency - len(self._making)
        )
        for _ in range(room):
            task = asyncio.ensure_future(self._make_one())
            self._making.add(task)
            task.add_done_callback(self._made)

    async def _make_one(self) -> None:
        self._on_the_way += 1
        try:
            shell = await self._made_or_not()
        except DsecError as err:
            log.warning("a shell cannot be made: %s", err)
            await self._failed(err)
            return
        except Exception as err:
            log.exception("a shell cannot be made")
            await self._failed(Unavailable(f"a shell cannot be made: {err!r}"))
            return
        self._last_error = None
        self._hand_out(shell)

    async def _made_or_not(self) -> W:
        try:
            return await self._make()
        finally:
            self._on_the_way -= 1

    async def _failed(self, err: DsecError) -> None:
        """When no other shell is on its way, one who waits is told; then a pause."""
        self._last_error = err
        while self._waiting and not self._on_the_way:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(err)
                break
        await asyncio.sleep(self._retry_s)

    def _hand_out(self, shell: W) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(shell)
                return
        self._ready.append(shell)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making.discard(task)
        self._fill()

    def _discard(self, shell: W) -> None:
        task = asyncio.ensure_future(self._drop(shell))
        self._making.add(task)
        task.add_done_callback(self._made)

    async def close(self) -> None:
        """Ends filling and removes every ready shell."""
        self._open = False
        self._wait_no_longer()
        for turn in self._waiting:
            if not turn.done():
                turn.set_exception(Unavailable("the pool of shells is closed"))
        making = list(self._making)
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        shells = list(self._ready)
        self._ready.clear()
        await asyncio.gather(*(self._drop(s) for s in shells), return_exceptions=True)
