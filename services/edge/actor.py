"""One sandbox on this node: an actor that does one thing at a time.

Owns: the order of driver calls for one sandbox, their deadlines, its time limits, the
observations that follow. Does not own: which sandboxes there are (supervisor), what
a command means (rules), commands inside (door).

An *ending* (stop, death, time-out) is not queued behind anything: it interrupts
whatever the actor does, a start included, and is the last thing it does. An ending is
observed only when the driver says that nothing of the sandbox is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from schemas.sandbox import EdgeOpItem, Observation, Observed
from services.edge import records, rules
from services.edge.admission import Amount
from services.edge.drivers.base import BackendReport, Driver, Exited, Handle, Pausable
from services.edge.ending import CANCEL_S, Ending, Fate, Interrupted
from services.edge.journal import Journal
from services.edge.layers.locate import Locator
from services.edge.observer import Observer
from services.edge.records import Change, SandboxRow
from shared import lifecycle, telemetry
from shared.clock import Clock
from shared.errors import (
    Conflict,
    DeadlineExceeded,
    DsecError,
    Internal,
    Unavailable,
    Unsupported,
)
from shared.wire import to_wire

log = logging.getLogger(__name__)

TELL_STARTING_S = 0.5
"""A start that takes longer is announced before it has ended."""
PAUSE_S = 30.0
READY_S = 10.0
"""Longest wait of a command for a sandbox that is being resumed or found again."""
RETRY_MIN_S, RETRY_MAX_S = 0.2, 15.0
MAX_QUEUED = 64

State = Literal["starting", "recovering", "running", "paused", "ending", "gone"]


@dataclass(frozen=True, slots=True)
class Context:
    """What all actors share."""

    journal: Journal
    observer: Observer
    locator: Locator
    clock: Clock
    starts: asyncio.Semaphore
    stop_timeout_s: float
    recover_timeout_s: float
    report: Callable[[str], BackendReport]
    gone: Callable[[Sandbox], None]


class Sandbox:
    """The actor. Made from a journalled row; :meth:`launch` sets it going."""

    def __init__(self, row: SandboxRow, driver: Driver, context: Context) -> None:
        item = row.accepted.item
        self.uid, self.project = item.uid, item.project
        self.accepted = row.accepted
        self.generation = row.generation
        self.backend = row.accepted.resolved.spec.backend
        self.demand: Amount = rules.demand(row.accepted.resolved.spec)
        self.driver = driver
        self.handle: Handle | None = row.handle
        self.epoch = row.epoch
        self.state: State = "starting" if row.handle is None else "recovering"
        self.started_at = row.started_at or context.clock.now()
        self.active_at = context.clock.now()
        self.fate = Fate()
        self._paused = row.paused
        self._times = row.times
        self._context = context
        self._queue: asyncio.Queue[tuple[str, EdgeOpItem | None]] = asyncio.Queue(MAX_QUEUED)
        self._running = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._busy: dict[object, Callable[[DsecError], None]] = {}
        self._seq = 0
        self._waking = False
        self._telling: asyncio.Task[None] | None = None

    # -- what others ask of it ------------------------------------------------

    def launch(self) -> None:
        """Begins: starts the sandbox, or finds it again by its handle."""
        self._task = asyncio.create_task(self._run(), name=f"sandbox {self.uid}")

    @property
    def ending(self) -> Ending | None:
        """Why it ends, once that is known."""
        return self.fate.ending

    def end(self, ending: Ending) -> None:
        """Ends it, whatever it does now. The first ending counts."""
        self.fate.seal(ending)

    def died(self, exited: Exited) -> None:
        """The driver says that it ended by itself."""
        cause = exited.cause if exited.cause in lifecycle.CAUSES else "runtime"
        self.end(Ending("failed", cause, exited.message[:1000]))

    def operate(self, verb: str, item: EdgeOpItem | None) -> None:
        """Queues an operation. Raises ``Unavailable`` when too many wait."""
        try:
            self._queue.put_nowait((verb, item))
        except asyncio.QueueFull:
            raise Unavailable(f"sandbox {self.uid}: too many operations wait") from None

    async def ready(self) -> Handle:
        """The handle of the running sandbox; a paused one is resumed first, once,
        however many ask. Raises ``SandboxDied`` or ``Unavailable``."""
        if self.state == "starting":
            raise Unavailable("the sandbox is starting", retry_after_s=0.2)
        if self.state == "paused" and not self._waking:
            self._waking = True
            self.operate("wake", None)
        if self.state != "running" and self.ending is None:
            waiter = asyncio.ensure_future(self._running.wait())
            either: set[asyncio.Future[Any]] = {self.fate.sealed, waiter}
            await asyncio.wait(either, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
        if self.state != "running" and self.ending is None:
            raise Unavailable(f"the sandbox is {self.state}", retry_after_s=0.5)
        return self.present()

    def present(self) -> Handle:
        """The handle, right after :meth:`ready`. Raises as it does."""
        if self.ending is not None:
            raise self.ending.death()
        if self.handle is None:
            raise Unavailable("the sandbox is starting", retry_after_s=0.2)
        return self.handle

    def enter(self, key: object, abort: Callable[[DsecError], None]) -> None:
        """A command begins: activity until :meth:`leave`. ``abort`` ends it early."""
        self._busy[key] = abort
        self.active_at = self._context.clock.now()

    def leave(self, key: object) -> None:
        """The command has ended."""
        self._busy.pop(key, None)
        self.active_at = self._context.clock.now()

    @property
    def busy(self) -> int:
        """Commands that run."""
        return len(self._busy)

    @property
    def idle_s(self) -> float:
        """Seconds since the last activity."""
        return 0.0 if self._busy else max(0.0, self._context.clock.now() - self.active_at)

    def next_seq(self) -> int:
        """The number of the next command in this epoch."""
        self._seq += 1
        return self._seq

    def observation(self, observed: Observed | None = None, **more: Any) -> Observation:
        """What is true now, at the present generation."""
        now: Observed = "starting"
        if self.state == "running" or self.state == "paused":
            now = self.state
        return Observation(
            uid=self.uid, generation=self.generation, observed=observed or now,
            at=self._context.clock.now(),
            enforcement=dict(self.handle.enforcement) if self.handle else {}, **more,
        )  # fmt: skip

    async def close(self) -> None:
        """The edge ends: the sandbox lives on, a start in flight is undone."""
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_S)

    # -- its life ---------------------------------------------------------------

    async def _run(self) -> None:
        try:
            await (self._start() if self.handle is None else self._recover())
            self._look_at_the_clock()
            while True:
                verb, item = await self.fate.race(self._queue.get())
                await self._operate(verb, item)
        except Interrupted:
            pass
        except DsecError as exc:
            observed, cause = rules.failed_start(exc)
            self.end(Ending(observed, cause, exc.message, exc))
        except Exception as exc:
            log.exception("sandbox %s", self.uid)
            error = Internal(f"{type(exc).__name__} in the driver {self.backend}")
            self.end(Ending("failed", "internal", error.message, error))
        await self._end()

    async def _start(self) -> None:
        left_s = self.accepted.item.expires_at - self._context.clock.now()
        late = DeadlineExceeded("the sandbox did not start in time", cause="start_timeout")
        if left_s <= 0:
            raise late
        loop = asyncio.get_running_loop()
        tell = loop.call_later(TELL_STARTING_S, self._tell_starting)
        try:
            self.handle = await self.fate.race(self._start_driver(), left_s)
        except TimeoutError:
            raise late from None
        finally:
            tell.cancel()
        self.started_at = self._context.clock.now()
        await self._now_running(
            self.observation("running"),
            records.started(self.uid, self.handle, self.started_at),
        )

    async def _start_driver(self) -> Handle:
        item, resolved = self.accepted.item, self.accepted.resolved
        report = self._context.report(self.backend)
        pausable = isinstance(self.driver, Pausable)
        refusal = rules.check_spec(resolved.spec, report, pausable=pausable)
        if refusal:
            raise refusal
        with telemetry.span("edge start", parents=[item.trace]):
            # a store that is slow for some must not keep the places of others
            layers = await self._context.locator.find([one.digest for one in resolved.layers])
            async with self._context.starts:
                return await self.driver.start(rules.start_spec(item, resolved, layers))

    def _tell_starting(self) -> None:
        if self.ending is None:
            work = self._context.observer.emit([self.observation("starting")])
            self._telling = asyncio.create_task(work)

    async def _recover(self) -> None:
        wait_s = RETRY_MIN_S
        spec = rules.start_spec(self.accepted.item, self.accepted.resolved, [])
        while True:
            assert self.handle is not None
            try:
                found = await self.fate.race(
                    self.driver.recover(self.handle, spec), self._context.recover_timeout_s
                )
                break
            except (DsecError, TimeoutError) as exc:
                # no answer is no death: the engine may be away for a while
                log.warning("sandbox %s is not found again yet: %r", self.uid, exc)
                await self.fate.race(asyncio.sleep(wait_s))
                wait_s = min(RETRY_MAX_S, wait_s * 2)
        if found is None:
            self.end(Ending("failed", "runtime", "it was gone when the edge came back"))
            raise Interrupted
        self.handle = found
        self.epoch += 1
        self.state = "paused" if self._paused else "running"
        change = records.recovered(self.uid, found, self.epoch)
        if self._paused:
            await self._context.observer.emit([self.observation()], change)
        else:
            await self._now_running(self.observation(), change)

    async def _now_running(self, observation: Observation, *changes: Change) -> None:
        self.active_at = self._context.clock.now()
        await self._context.observer.emit([observation], *changes)
        if self.ending is None:
            self.state = "running"
            self._running.set()

    async def _end(self) -> None:
        ending = self.ending
        assert ending is not None
        self.state = "ending"
        if self._timer:
            self._timer.cancel()
        for abort in list(self._busy.values()):
            abort(ending.death())
        if self.handle is not None:
            await self._stop_driver(ending.grace_s)
        observation = self.observation(
            ending.observed, cause=ending.cause, message=ending.message[:1000],
            error=to_wire(ending.error) if ending.error else None,
        )  # fmt: skip
        self.state = "gone"
        await self._context.observer.emit(
            [observation], records.bury(observation), *records.remove(self.uid)
        )
        # only now: until the tombstone is there, a late start must find the sandbox
        self._context.gone(self)

    async def _stop_driver(self, grace_s: float) -> None:
        assert self.handle is not None
        wait_s = RETRY_MIN_S
        while True:
            try:
                async with asyncio.timeout(self._context.stop_timeout_s + grace_s):
                    await self.driver.stop(self.handle, grace_s=grace_s)
                return
            except Exception as exc:  # nothing is reported gone that may be there
                log.error("sandbox %s is not stopped yet: %r", self.uid, exc)
            grace_s = 0.0
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MAX_S, wait_s * 2)

    # -- operations ---------------------------------------------------------------

    async def _operate(self, verb: str, item: EdgeOpItem | None) -> None:
        error: DsecError | None = None
        was = self.state
        try:
            if verb == "pause":
                await self._pause()
            elif verb in ("resume", "wake"):
                await self._resume()
            elif item is not None:
                self._times = self._times.changed(item.ttl_running_stop, item.deadline_s)
        except TimeoutError:
            error = Unavailable(f"{verb}: no answer in {PAUSE_S:g} s")
        except DsecError as exc:
            error = exc
        finally:
            self._waking = False
        if verb != "wake" or was != self.state or error:
            await self._tell(verb, error)
        self._look_at_the_clock()

    async def _tell(self, verb: str, error: DsecError | None) -> None:
        observed: Observed = "paused" if self.state == "paused" else "resumed"
        if verb == "set_timeout" and self.state == "running":
            observed = "running"
        row = records.state(self.uid, self.generation, paused=self._paused, times=self._times)
        observation = self.observation(observed, error=to_wire(error) if error else None)
        await self._context.observer.emit([observation], row, records.op_done(self.uid, verb))

    async def _pause(self) -> None:
        if self.state == "paused":
            return
        if not isinstance(self.driver, Pausable):
            raise Unsupported(f"backend {self.backend} can't pause", field="backend")
        assert self.handle is not None
        self._running.clear()
        self.state = "paused"  # from here commands wait for a resume
        try:
            await self.fate.race(self.driver.pause(self.handle), PAUSE_S)
        except (DsecError, TimeoutError):
            self.state = "running"
            self._running.set()
            raise
        self._paused = True

    async def _resume(self) -> None:
        if self.state != "paused":
            return
        if not isinstance(self.driver, Pausable):
            raise Conflict("the sandbox is paused by a driver that can't resume it")
        assert self.handle is not None
        await self.fate.race(self.driver.resume(self.handle), PAUSE_S)
        self._paused = False
        self.state = "running"
        self.active_at = self._context.clock.now()
        self._running.set()

    # -- time ---------------------------------------------------------------------

    def _look_at_the_clock(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self.ending is not None:
            return
        due = rules.due(
            self._times, now=self._context.clock.now(), started_at=self.started_at,
            active_at=self.active_at, busy=bool(self._busy), running=self.state == "running",
        )  # fmt: skip
        spec = self.accepted.resolved.spec
        if due.cause == "idle_timeout" and spec.on_timeout == "pause":
            self.active_at = self._context.clock.now()  # once, not until it is done
            with contextlib.suppress(Unavailable):
                self.operate("pause", None)
            due = rules.Due(None, PAUSE_S)
        if due.cause:
            self.end(Ending("stopped", due.cause))
        elif due.wait_s is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(due.wait_s, self._look_at_the_clock)
