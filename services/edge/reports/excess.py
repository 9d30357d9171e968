"""Tells audit what sandboxes take until they are stopped, and which commands are worth a
word.

Owns: which counters are looked at when, what became more since it was told. Does not own:
what is too much (audit's rules), limits (the kernel's), which commands (noted).

Counters only grow, and what was told is noted only when the bus has stored it: while it is
away nothing is lost, and what is told then is one sum. What happened while no edge ran is
not told: a sandbox that is found again begins with what its counters say by then.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from schemas.audit import Violation, Violations
from schemas.base import encode
from schemas.subjects import sec
from services.edge.drivers.base import Driver
from services.edge.drivers.counters import Counters, Counting
from services.edge.drivers.offers import offered
from services.edge.link import Link
from services.edge.sandbox.actor import Sandbox
from services.edge.supervisor import Supervisor
from shared import ids
from shared.bus import Outgoing
from shared.clock import Clock
from shared.errors import DsecError

log = logging.getLogger(__name__)

LOOK_S = 1.0
BUSY_S = 30.0
"""Idle for so long, a sandbox is looked at rarely."""
RARELY = 10
"""In every so many looks."""
SOURCE: Final = "resource"
OBSERVER: Final = "observer"
VERDICT: Final = "observed"
MAX_TOLD = 1_000
"""Violations of one message; the others wait for the next look."""


@dataclass(frozen=True, slots=True)
class Seen:
    """Absolute counters of a sandbox; ``full``: its disk is."""

    pids_refused: int = 0
    oom_kills: int = 0
    dropped_bytes: int = 0
    full: int = 0


@dataclass(frozen=True, slots=True)
class Kind:
    """A counter, the rule that it speaks of, and what enforces that."""

    field: str
    rule: str
    mechanism: str
    measure: str = ""


KINDS = (
    Kind("pids_refused", "pids_limit", "cgroup pids"),
    Kind("oom_kills", "memory_limit", "cgroup memory"),
    Kind("dropped_bytes", "output_limit", "output budget", "dropped_bytes"),
    Kind("full", "disk_limit", "disk quota"),
)


class Excess:
    """Runs beside the edge."""

    def __init__(self, supervisor: Supervisor, *, node: str, link: Link, clock: Clock) -> None:
        self._supervisor, self._node, self._link, self._clock = supervisor, node, link, clock
        self._told: dict[tuple[str, int], Seen] = {}
        self._looks = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except DsecError as error:
                log.debug("what sandboxes ran into is told later: %s", error.message)
            except Exception:
                log.exception("counters of sandboxes")

    async def look(self) -> None:
        """Reads counters and tells what became more."""
        self._looks += 1
        there = self._supervisor.sandboxes
        for key in [key for key in self._told if key[0] not in there]:
            del self._told[key]
        by_driver: dict[Driver, list[Sandbox]] = defaultdict(list)
        for sandbox in self._due():
            by_driver[sandbox.driver].append(sandbox)
        found: list[tuple[Sandbox, Seen]] = []
        for driver, sandboxes in by_driver.items():
            counting = offered(driver, Counting)
            handles = [s.handle for s in sandboxes if s.handle is not None]
            counters = await counting.counters(handles) if counting else [Counters()] * len(handles)
            found += zip(sandboxes, map(_seen, sandboxes, counters), strict=True)
        await self._tell(found)
        await self._tell_commands()

    def _due(self) -> Iterator[Sandbox]:
        for number, sandbox in enumerate(list(self._supervisor.sandboxes.values())):
            if sandbox.handle is None or sandbox.state not in ("running", "paused"):
                continue
            if sandbox.activity.idle_s < BUSY_S or (self._looks + number) % RARELY == 0:
                yield sandbox

    async def _tell(self, found: Sequence[tuple[Sandbox, Seen]]) -> None:
        violations: list[Violation] = []
        told: dict[tuple[str, int], Seen] = {}
        for sandbox, seen in found:
            key = (sandbox.uid, sandbox.epoch)
            before = self._told.get(key)
            if before is None:
                before = Seen() if sandbox.epoch == 0 else seen
            if len(violations) < MAX_TOLD:
                violations += self._violations(sandbox, before, seen)
                told[key] = seen
        if violations:
            body = encode(Violations(node=self._node, violations=violations))
            msg_id = f"{self._node}-{SOURCE}-{violations[0].id}-{violations[-1].id}"
            subject = sec(SOURCE, VERDICT, self._node)
            await self._link.bus.store([Outgoing(subject, body, msg_id=msg_id)])
        self._told.update(told)

    async def _tell_commands(self) -> None:
        """What clients ran, in its bare form. One that the bus did not take comes again."""
        for sandbox in list(self._supervisor.sandboxes.values()):
            noted = sandbox.activity.noted
            forms = list(noted)
            if not forms:
                continue
            noted.clear()  # while they are told more may come, and push out what is here
            told = [
                Violation(
                    id=ids.new(), at=self._clock.now(), node=self._node, uid=sandbox.uid,
                    project=sandbox.project, source=OBSERVER, verdict=VERDICT, rule="command",
                    mechanism="door", action="exec", subject=form, count=count,
                )
                for form, count in Counter(forms).items()
            ]  # fmt: skip
            body = encode(Violations(node=self._node, violations=told))
            subject = sec(OBSERVER, VERDICT, self._node)
            try:
                await self._link.bus.store([Outgoing(subject, body, msg_id=told[0].id)])
            except BaseException:
                later = [*forms, *noted]
                noted.clear()
                noted.extend(later)
                raise

    def _violations(self, sandbox: Sandbox, before: Seen, seen: Seen) -> Iterator[Violation]:
        for kind in KINDS:
            total = getattr(seen, kind.field)
            more = total - getattr(before, kind.field)
            if more <= 0:
                continue
            yield Violation(
                id=f"{sandbox.uid}-{sandbox.epoch}-{kind.rule}-{total}", at=self._clock.now(),
                node=self._node, uid=sandbox.uid, project=sandbox.project, source=SOURCE,
                verdict=VERDICT, rule=kind.rule, mechanism=kind.mechanism,
                count=1 if kind.measure else more, subject=f"{total} in all",
                actor={kind.measure: more} if kind.measure else {},
            )  # fmt: skip


def _seen(sandbox: Sandbox, counters: Counters) -> Seen:
    return Seen(
        pids_refused=counters.pids_refused, oom_kills=counters.oom_kills,
        dropped_bytes=sandbox.activity.dropped_bytes, full=int(counters.disk_full),
    )  # fmt: skip
