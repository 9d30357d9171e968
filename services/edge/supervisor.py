"""All sandboxes of this node.

Owns: which there are, what commands are accepted, what is committed, what happens to
them when the edge starts and ends. Does not own: one sandbox's life (actor), decisions
(rules, admission), the bus (handlers).

A batch of commands is judged first, journalled in one commit, and then acted on: what
was acknowledged to the bus is never forgotten, what was not comes again and is judged
by generation.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from schemas.sandbox import EdgeOp, EdgeOpItem, EdgeStart, Observation, StartItem
from services.edge.admission import Amount, Limits, Measured, admit
from services.edge.drivers.base import BackendReport, Driver, Exited, Resumable
from services.edge.journal import records
from services.edge.journal.journal import Journal
from services.edge.journal.records import Accepted, Change, SandboxRow, Tombstone
from services.edge.layers.locate import Locator
from services.edge.reports.observer import Observer
from services.edge.sandbox import repolicing, rules
from services.edge.sandbox.actor import Context, Sandbox
from services.edge.sandbox.ending import Ending
from services.edge.snapshots.branches import Captures
from shared.clock import Clock
from shared.errors import DsecError, Unavailable, Unsupported
from shared.wire import to_wire

log = logging.getLogger(__name__)

OPEN_S = 60.0
SWEEP_S = 120.0
CLOSE_S = 8.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the node and of waiting; see :mod:`settings`."""

    limits: Limits
    start_concurrency: int = 16
    stop_timeout_s: float = 30.0
    recover_timeout_s: float = 20.0
    verifying_max_s: float = 3_600.0


@dataclass(slots=True)
class _Decided:
    """What a batch comes to: changes to commit, observations, then actions."""

    changes: list[Change] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    actions: list[Callable[[], None]] = field(default_factory=list)
    stops: list[Callable[[], None]] = field(default_factory=list)
    added: list[Sandbox] = field(default_factory=list)
    buried: dict[str, Tombstone] = field(default_factory=dict)


Command = EdgeStart | tuple[str, EdgeOp]


class Supervisor:
    """The sandboxes of this node, by uid."""

    def __init__(
        self, drivers: Mapping[str, Driver], *, journal: Journal, observer: Observer,
        locator: Locator, clock: Clock, bounds: Bounds, measured: Callable[[], Measured],
        routed: Callable[[Sandbox], Coroutine[Any, Any, None]],
        told: Callable[[str], Awaitable[None]], routes: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._drivers = dict(drivers)
        self._closed = set(drivers)  # not opened yet
        self._journal = journal
        self._observer = observer
        self._clock = clock
        self._limits = bounds.limits
        self._routes = routes
        self._measured = measured
        self.reports: dict[str, BackendReport] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.committed = Amount()
        self._context = Context(
            journal=journal, observer=observer, locator=locator, clock=clock,
            starts=asyncio.Semaphore(bounds.start_concurrency),
            stop_timeout_s=bounds.stop_timeout_s, recover_timeout_s=bounds.recover_timeout_s,
            verifying_max_s=bounds.verifying_max_s,
            report=self._report, gone=self._gone, captures=Captures(self.find),
            routed=routed, told=told,
        )  # fmt: skip

    # -- the edge starts and ends ---------------------------------------------------

    async def open(self) -> None:
        """Finds the sandboxes of an earlier process again, removes leftovers, finishes
        what was accepted. Sandboxes of drivers that are not here any more have failed."""
        rows = records.load_sandboxes(self._journal.db)
        ops = records.load_ops(self._journal.db)
        self._journal.start()
        self._observer.start()
        known = frozenset(row.uid for row in rows if row.handle is not None)
        for name, driver in self._drivers.items():
            await self._open_driver(name, driver, known)
        for row in rows:
            await self._readopt(row)
        for verb, item in ops:
            self._redo(verb, item)

    async def _open_driver(self, name: str, driver: Driver, known: frozenset[str]) -> None:
        """Opens it and removes its leftovers, before anything is started on it."""
        try:
            async with asyncio.timeout(OPEN_S):
                await driver.probe()
                await driver.open(self.exited)
                report = await driver.probe()  # with what it made
            async with asyncio.timeout(SWEEP_S):
                swept = await driver.sweep(known)
        except Exception as exc:  # one bad backend must not take the others with it
            log.exception("driver %s does not open", name)
            self.reports[name] = BackendReport(False, f"it does not open: {exc}"[:500])
            return
        self._closed.discard(name)
        self.reports[name] = report
        if swept:
            log.warning("driver %s: removed leftovers of %s", name, ", ".join(swept))

    async def _readopt(self, row: SandboxRow) -> None:
        backend = row.accepted.resolved.spec.backend
        driver = self._drivers.get(backend)
        if driver is not None:
            self._add(row, driver).launch()
            return
        observation = Observation(
            uid=row.uid, generation=row.generation, observed="failed", cause="runtime",
            at=self._clock.now(), message=f"this node has no driver {backend} any more",
        )  # fmt: skip
        await self._observer.emit(
            [observation], records.bury(observation), *records.remove(row.uid)
        )

    def _redo(self, verb: str, item: EdgeOpItem) -> None:
        sandbox = self.sandboxes.get(item.uid)
        if sandbox is not None:
            self._apply(sandbox, verb, item)

    def let_go(self) -> None:
        """The edge is about to end: what ends from now on leaves its command running,
        where the driver can resume it."""
        for driver in self._drivers.values():
            if isinstance(driver, Resumable):
                driver.let_go()

    async def close(self) -> None:
        """Sandboxes live on; starts in flight are undone and begin again next time."""
        await asyncio.gather(*(s.close() for s in list(self.sandboxes.values())))
        await self._context.captures.close()
        for name, driver in self._drivers.items():
            try:
                async with asyncio.timeout(CLOSE_S):
                    await driver.close()
            except Exception:  # the other drivers are to be closed too
                log.exception("driver %s does not close", name)
        await self._observer.close()
        await self._journal.close()

    # -- commands ---------------------------------------------------------------------

    async def command(self, commands: Sequence[Command]) -> None:
        """Accepts a batch, in order. Raises ``Unavailable`` when it can't be
        journalled: then it is to come again, and nothing of it was done but its stops,
        which may be what makes room on a full disk and which do no harm twice."""
        decided = _Decided()
        uids = [uid for command in commands for uid in _uids(command)]
        decided.buried = await self._journal.run(lambda db: records.find_tombstones(db, uids))
        try:
            for command in commands:
                self._judge(command, decided)
            await self._journal.write(*decided.changes)
        except BaseException as exc:
            for sandbox in decided.added:
                self._gone(sandbox)
            if isinstance(exc, Unavailable):
                for stop in decided.stops:
                    stop()
            raise
        for action in decided.actions:
            action()
        if decided.observations:
            await self._observer.emit(decided.observations)

    def _judge(self, command: Command, decided: _Decided) -> None:
        if isinstance(command, EdgeStart):
            for start in command.starts:
                self._judge_start(command, start, decided)
            return
        verb, message = command
        for item in message.items:
            self._judge_op(verb, item, decided)

    def _judge_start(self, message: EdgeStart, item: StartItem, decided: _Decided) -> None:
        present = self.sandboxes.get(item.uid)
        tomb = decided.buried.get(item.uid)
        verdict = rules.judge_start(
            item.generation,
            present=present.generation if present else None,
            buried=tomb.generation if tomb else None,
        )
        if verdict == "bury" and tomb:
            decided.observations.append(tomb.observation)
        elif verdict == "start":
            self._begin(Accepted(item=item, resolved=message.specs[item.spec]), decided)
        elif present:
            if verdict == "adopt":
                present.generation = item.generation
                decided.changes.append(records.adopted(item.uid, item.generation))
            # what an ending sandbox comes to is told when it has come to it
            if present.settled:
                decided.observations.append(present.observation())

    def _begin(self, accepted: Accepted, decided: _Decided) -> None:
        spec, item = accepted.resolved.spec, accepted.item
        driver = self._drivers.get(spec.backend)
        error: DsecError | None = None
        if driver is None:
            error = Unsupported(f"this node has no backend {spec.backend}", field="backend")
        else:
            error = rules.check_routes(spec, self._routes) or admit(
                rules.demand(spec), committed=self.committed, limits=self._limits,
                measured=self._measured(),
            )  # fmt: skip
        if error is not None or driver is None:
            assert error is not None
            self._refuse(item, error, decided)
            return
        times = rules.times(spec)
        row = SandboxRow(accepted, item.generation, times)
        sandbox = self._add(row, driver)
        decided.added.append(sandbox)
        decided.changes.append(records.accept(row))
        decided.actions.append(sandbox.launch)

    def _refuse(self, item: StartItem, error: DsecError, decided: _Decided) -> None:
        observation = Observation(
            uid=item.uid, generation=item.generation, observed="refused", at=self._clock.now(),
            cause=error.cause or "capacity", message=error.message, error=to_wire(error),
        )  # fmt: skip
        decided.observations.append(observation)
        decided.changes.append(records.bury(observation))

    def _judge_op(self, verb: str, item: EdgeOpItem, decided: _Decided) -> None:
        sandbox = self.sandboxes.get(item.uid)
        if sandbox is None or sandbox.project != item.project:
            self._absent(verb, item, decided)
        elif _judged(verb, item, sandbox) == "repeat":
            if sandbox.settled:
                decided.observations.append(sandbox.observation())
        else:
            if item.tighten is not None:
                decided.changes.append(repolicing.note(sandbox, item.tighten))
            if verb == "set_timeout":
                sandbox.time.judged_at = item.asked_at
            decided.changes.append(records.op(verb, item))
            decided.actions.append(lambda: self._apply(sandbox, verb, item))
            if verb == "stop":
                decided.stops.append(decided.actions[-1])

    def _absent(self, verb: str, item: EdgeOpItem, decided: _Decided) -> None:
        tomb = decided.buried.get(item.uid)
        generation = max(item.generation, tomb.generation if tomb else 0)
        if tomb and tomb.observation.observed != "refused":
            old = tomb.observation
            again = msgspec.structs.replace(old, generation=generation)
            decided.observations.append(again)
            return
        observation = Observation(
            uid=item.uid, generation=generation, observed="unknown", at=self._clock.now(),
            cause="cancelled" if verb == "stop" else None,
            message="no such sandbox on this node",
        )  # fmt: skip
        decided.observations.append(observation)
        if verb == "stop":  # a start that is still on its way comes too late
            decided.changes.append(records.bury(observation))
            decided.buried[item.uid] = Tombstone(generation, observation)

    def _apply(self, sandbox: Sandbox, verb: str, item: EdgeOpItem) -> None:
        sandbox.generation = max(sandbox.generation, item.generation)
        if verb == "stop":
            cause = item.cause or "completed"
            sandbox.end(Ending("stopped", cause, grace_s=item.grace_s))
            return
        try:
            sandbox.operate(verb, item)
        except Unavailable as exc:  # the scheduler sends it again
            log.warning("%s", exc.message)

    # -- what others ask ----------------------------------------------------------------

    def find(self, project: str, uid: str) -> Sandbox | None:
        """The sandbox, where it is here and of this project."""
        sandbox = self.sandboxes.get(uid)
        return sandbox if sandbox and sandbox.project == project else None

    def counts(self) -> dict[str, dict[str, int]]:
        """Live sandboxes by backend and project."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for sandbox in self.sandboxes.values():
            found[sandbox.backend][sandbox.project] += 1
        return {backend: dict(projects) for backend, projects in found.items()}

    def forget(self, uids: Sequence[str]) -> None:
        """Ends sandboxes that the scheduler knows to be over."""
        for uid in uids:
            sandbox = self.sandboxes.get(uid)
            if sandbox is not None:
                log.warning("sandbox %s is over for the scheduler: removed", uid)
                sandbox.end(Ending("stopped", "cancelled", "it was over for the scheduler"))

    async def probe(self) -> None:
        """Asks the drivers again what they can do; opens those that did not open."""
        for name, driver in self._drivers.items():
            if name in self._closed:
                await self._open_driver(name, driver, frozenset(self.sandboxes))
            else:
                self.reports[name] = await driver.probe()

    async def exited(self, exited: Exited) -> None:
        """A driver tells of a death."""
        sandbox = self.sandboxes.get(exited.uid)
        if sandbox is not None:
            sandbox.died(exited)

    # -- means ----------------------------------------------------------------------------

    def _report(self, backend: str) -> BackendReport:
        return self.reports.get(backend) or BackendReport(False, "it was not probed yet")

    def _add(self, row: SandboxRow, driver: Driver) -> Sandbox:
        sandbox = Sandbox(row, driver, self._context)
        self.sandboxes[sandbox.uid] = sandbox
        self.committed = self.committed.plus(sandbox.demand)
        return sandbox

    def _gone(self, sandbox: Sandbox) -> None:
        if self.sandboxes.get(sandbox.uid) is sandbox:
            del self.sandboxes[sandbox.uid]
            self.committed = self.committed.minus(sandbox.demand)


def _judged(verb: str, item: EdgeOpItem, sandbox: Sandbox) -> str:
    return rules.judge_op(
        verb, item.generation, present=sandbox.generation, asked_at=item.asked_at,
        renewed_at=sandbox.time.judged_at,
    )  # fmt: skip


def _uids(command: Command) -> list[str]:
    if isinstance(command, EdgeStart):
        return [item.uid for item in command.starts]
    return [item.uid for item in command[1].items]
