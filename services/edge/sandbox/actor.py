"""One sandbox on this node: an actor that does one thing at a time.

Owns: the order of driver calls for one sandbox, their deadlines, its time limits, the
observations that follow. Does not own: which sandboxes there are (supervisor), what a
command means (rules), commands inside (door), activity, pauses, repolicing.

An *ending* (stop, death, time-out) is not queued: it interrupts whatever the actor does, a
start included. It is observed only when the driver says that nothing of the sandbox is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Literal

from msgspec import structs

from schemas.control import PolicyRequest
from schemas.sandbox import EdgeOpItem, Observation, Observed
from services.edge.admission import Amount
from services.edge.drivers.base import BackendReport, Driver, Exited, Handle
from services.edge.journal import records, timerecords
from services.edge.journal.journal import Journal
from services.edge.journal.logged import Numbers
from services.edge.journal.records import Change, SandboxRow
from services.edge.layers.locate import Locator
from services.edge.reports.observer import Observer
from services.edge.sandbox import repolicing, rules, timeup
from services.edge.sandbox.activity import Activity
from services.edge.sandbox.ending import CANCEL_S, Ending, Fate, Interrupted
from services.edge.sandbox.pauses import PAUSE_S, Asks, Pauses
from services.edge.sandbox.runclock import RunClock
from services.edge.sandbox.timekeeping import Timekeeper
from services.edge.snapshots.branches import Captures
from shared import lifecycle, telemetry
from shared.clock import Clock
from shared.errors import DeadlineExceeded, DsecError, Internal, Unavailable
from shared.wire import to_wire

log = logging.getLogger(__name__)

TELL_STARTING_S = 0.5
"""A start that takes longer is announced before it has ended."""
READY_S = 10.0
"""Longest wait of a command for a sandbox that is being resumed or found again."""
RETRY_MIN_S, RETRY_MAX_S = 0.2, 15.0
MAX_QUEUED = 64

Phase = Literal["starting", "recovering", "live", "ending", "gone"]


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
    verifying_max_s: float
    report: Callable[[str], BackendReport]
    gone: Callable[[Sandbox], None]
    captures: Captures
    routed: Callable[[Sandbox], Coroutine[Any, Any, None]]
    told: Callable[[str], Awaitable[None]]


class Sandbox:
    """The actor. Made from a journalled row; :meth:`launch` sets it going."""

    def __init__(self, row: SandboxRow, driver: Driver, context: Context) -> None:
        item = row.accepted.item
        self.uid, self.project = item.uid, item.project
        self.accepted, self.generation = row.accepted, row.generation
        self.backend = row.accepted.resolved.spec.backend
        self.demand: Amount = rules.demand(row.accepted.resolved.spec)
        self.handle: Handle | None = row.handle
        self.driver, self.epoch = driver, row.epoch
        self.fate = Fate()
        self.clock = RunClock(context.clock.monotonic)
        self.activity = Activity(self.clock)
        self.pauses = Pauses(
            driver, self.fate, self.clock, paused=row.paused, failed=self._cannot_stand
        )
        self._phase: Phase = "starting" if row.handle is None else "recovering"
        self.time = Timekeeper(
            row.times, context.clock, self.activity,
            started_at=row.started_at or context.clock.now(),
            running=lambda: self.pauses.standing == "running", turn=self._time_is_up,
            end=lambda cause: self.end(Ending("stopped", cause)),
            kept=row.kept, held_max_s=context.verifying_max_s,
        )  # fmt: skip
        self.asks = Asks(lambda order: self.operate(order, None))
        self._context = context
        self.repolicing = asyncio.Lock()
        self._queue: asyncio.Queue[tuple[str, EdgeOpItem | None]] = asyncio.Queue(MAX_QUEUED)
        self._found = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.numbers = Numbers(row.seq)
        self._failure: DsecError | None = None
        self._telling: asyncio.Task[None] | None = None

    # -- what others ask of it ------------------------------------------------

    def launch(self) -> None:
        """Begins: starts the sandbox, or finds it again by its handle."""
        self._task = asyncio.create_task(self._run(), name=f"sandbox {self.uid}")

    @property
    def state(self) -> str:
        """``starting recovering running pausing paused resuming ending gone``."""
        return self.pauses.standing if self._phase == "live" else self._phase

    @property
    def settled(self) -> bool:
        """Whether nothing waits to be done."""
        return self.state in ("running", "paused") and self._queue.empty()

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
        """Queues an operation; new time limits are in force at once, however long the
        queue. Raises ``Unavailable`` when too many wait."""
        if verb == "set_timeout" and item is not None:
            self.time.renew(item.ttl_running_stop, item.deadline_s, asked_at=item.asked_at)
            if self._phase == "live" and self.ending is None:
                self.time.look()
        if self._queue.full():
            raise Unavailable(f"sandbox {self.uid}: too many operations wait")
        self._queue.put_nowait((verb, item))

    async def found(self) -> None:
        """Returns when the sandbox is there, paused or not. Raises as :meth:`ready`."""
        if self._phase == "starting":
            raise Unavailable("the sandbox is starting", retry_after_s=0.2)
        if self._phase == "recovering":
            await self.fate.outlast(self._found.wait(), READY_S)
            if self._phase == "recovering" and self.ending is None:
                raise Unavailable("the sandbox is recovering", retry_after_s=0.5)
        self.present()

    async def ready(self) -> Handle:
        """The handle of the running sandbox; a paused one is resumed first, once,
        however many ask. Raises ``SandboxDied`` or ``Unavailable``."""
        if self.state == "running":
            return self.present()
        await self.found()
        try:
            async with asyncio.timeout(READY_S):
                while self.state != "running" and self.ending is None:
                    await self.fate.outlast(asyncio.shield(self.asks.ask("wake")), READY_S)
        except TimeoutError:
            raise Unavailable(f"the sandbox is {self.state}", retry_after_s=0.5) from None
        return self.present()

    async def fetched_bytes(self) -> int | None:
        """What this node fetched of its layers so far; ``None`` where that is not known."""
        layers = self.accepted.resolved.layers
        return await self._context.locator.fetched_bytes([one.digest for one in layers])

    def nudge(self) -> None:
        """Somebody uses what runs in it: a paused sandbox goes on."""
        if self.state in ("pausing", "paused") and self.ending is None:
            with contextlib.suppress(Unavailable):
                self.asks.ask("wake")

    def present(self) -> Handle:
        """The handle, right after :meth:`ready`. Raises as it does."""
        if self.ending is not None:
            raise self.ending.death()
        if self.handle is None:
            raise Unavailable("the sandbox is starting", retry_after_s=0.2)
        return self.handle

    async def enforce(self, request: PolicyRequest) -> Handle:
        return await repolicing.enforce(self, self._context, request)

    async def keep_time(self) -> None:
        """Journals what of its time is kept."""
        await self._context.observer.emit([], timerecords.keep(self.uid, self.time.durable))

    def observation(self, observed: Observed | None = None, **more: Any) -> Observation:
        """What is true now, at the present generation."""
        now: Observed = "starting"
        if self._phase == "live":
            now = "paused" if self.pauses.standing in ("paused", "resuming") else "running"
        return Observation(
            uid=self.uid, generation=self.generation, observed=observed or now,
            at=self._context.clock.now(),
            enforcement=dict(self.handle.enforcement) if self.handle else {}, **more,
        )  # fmt: skip

    async def close(self) -> None:
        """The edge ends: the sandbox lives on, a start in flight is undone."""
        self.time.stop()
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CANCEL_S)
        await self.pauses.rest()

    # -- its life ---------------------------------------------------------------

    async def _run(self) -> None:
        try:
            with self._context.observer.expected():
                await (self._start() if self.handle is None else self._recover())
            self.time.look()
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
        tell = asyncio.get_running_loop().call_later(TELL_STARTING_S, self._tell_starting)
        try:
            self.handle = await self.fate.race(self._start_driver(), left_s)
        except TimeoutError:
            raise late from None
        finally:
            tell.cancel()
        self.time.started(self._context.clock.now())
        started = records.started(self.uid, self.handle, self.time.started_at)
        await self._now_live(*repolicing.inherited(self), started)

    async def _start_driver(self) -> Handle:
        item, resolved = self.accepted.item, self.accepted.resolved
        refusal = rules.check_spec(resolved.spec, self._context.report(self.backend))
        if refusal:
            raise refusal
        with telemetry.span("edge start", parents=[item.trace]):
            # a store that is slow for some must not keep the places of others
            layers = await self._context.locator.find([one.digest for one in resolved.layers])
            async with self._context.captures.below(self.accepted) as base, self._context.starts:
                if base.source is not None:
                    repolicing.inherit(self, base.source)
                spec = rules.start_spec(item, self.accepted.resolved, layers)
                return await self.driver.start(replace(spec, captures=base.captures))

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
                if found is not None:
                    await self.pauses.settle(found)
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
        await self._now_live(records.recovered(self.uid, found, self.epoch))

    async def _now_live(self, *changes: Change) -> None:
        self.activity.touch()
        now: Observed = "paused" if self.pauses.standing == "paused" else "running"
        if self.accepted.resolved.spec.routes:
            await self.fate.race(self._context.routed(self))
        await self._context.observer.emit([self.observation(now)], *changes)
        if self.ending is None:
            self._phase = "live"
            self._found.set()

    async def _end(self) -> None:
        ending = self.ending
        assert ending is not None
        self._phase = "ending"
        self.time.stop()
        self.activity.abort(ending.death())
        await self.pauses.rest()
        if self.handle is not None:
            await self._stop_driver(ending.grace_s)
        observation = self.observation(
            ending.observed, cause=ending.cause, message=ending.message[:1000],
            error=to_wire(ending.error) if ending.error else None,
        )  # fmt: skip
        self._phase = "gone"
        await self._context.observer.emit(
            [observation], records.bury(observation), *records.remove(self.uid),
            first=self._context.told(self.uid),  # who hears of its end may read its log
        )  # fmt: skip
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
        before = self.pauses.standing
        try:
            await self._do(verb)
        except TimeoutError:
            error = Unavailable(f"{verb}: no answer in {PAUSE_S:g} s")
        except DsecError as exc:
            error = exc
        if verb == "wake":
            self.asks.done(verb, error)
        if item is not None or error or before != self.pauses.standing:
            if verb == "wake" and error is None:
                error, self._failure = self._failure, None
            await self._tell(verb, error, item.generation if item else self.generation)
        self.asks.done(verb, error)
        if self.ending is None:
            self.time.look()

    async def _do(self, verb: str) -> None:
        assert self.handle is not None
        if verb in ("pause", "halt"):
            await self.pauses.pause(self.handle)
        elif verb in ("resume", "wake", "go"):
            await self.pauses.resume(self.handle)
            self.activity.touch()
        elif verb == "tighten":
            await repolicing.tighten(self, self._context)
        elif verb == "time":
            await timeup.act(self, self.handle)

    async def _tell(self, verb: str, error: DsecError | None, generation: int) -> None:
        paused = self.pauses.standing == "paused"
        observed: Observed = "paused" if paused else "running" if verb in rules.QUIET else "resumed"
        row = records.state(self.uid, self.generation, paused=paused, times=self.time.times)
        time = timerecords.keep(self.uid, self.time.durable)
        if verb == "set_timeout":  # has an order of its own, and is true of any command
            generation = self.generation
        failure = to_wire(error) if error else None
        found = self.observation(observed, error=failure, cause=self.pauses.cause)
        observation = structs.replace(found, generation=generation)
        done = records.op_done(self.uid, verb)
        await self._context.observer.emit([observation], row, time, done)

    def _cannot_stand(self, error: DsecError) -> None:
        self._failure = error
        self.nudge()

    def _time_is_up(self) -> bool:
        """In turn with everything else: what came before it is work."""
        with contextlib.suppress(Unavailable):
            self.operate("time", None)
            return True
        return False
