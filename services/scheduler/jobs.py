"""Jobs: their leases as trainers open and renew them, and what follows when they stop.

Owns: the handling of ``JobCommand``, the pass over leases that ran out, the answer to
who asks for jobs. Does not own: judgements (``leases``, ``decide``), SQL (``jobstore``).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import ErrorReply, encode
from schemas.job import JobCommand, JobPage, JobQuery, JobReply
from services.scheduler import decide, jobstore, leases
from services.scheduler.model import Changes, Sandbox
from services.scheduler.work import Unit, Work
from shared import lifecycle
from shared.bus import Incoming, Outgoing
from shared.db import Database
from shared.errors import DsecError
from shared.wire import to_wire

log = logging.getLogger(__name__)

STOOD = 0.5
"""Of a lease: later than that (and what a renewal may be late) a look finds that this
scheduler stood still, or was kept from its database: renewals are not handled yet."""
MAX_GAPS = 256
BY = "reconciler"
"""Who is noted to have paused, resumed and stopped what follows from a lease."""


class Jobs:
    """Handles commands, passes and questions about jobs. ``connected`` tells whether
    the bus is there: while it is away nobody could renew."""

    def __init__(self, work: Work, db: Database, *, connected: Callable[[], bool]) -> None:
        self._work = work
        self._db = db
        self._settings = work.settings
        self._connected = connected
        self._listening_since: float | None = None
        self._looked_at = time.monotonic()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=MAX_GAPS)

    async def handle(self, commands: Sequence[JobCommand]) -> None:
        """Opens and renews, in order, in one transaction; each is answered for itself."""
        if not commands:
            return
        async with self._work.unit() as unit:
            connection = unit.connection
            rows = await jobstore.lock(connection, {(c.project, c.request.job) for c in commands})
            now, before = time.time(), dict(rows)
            for command in commands:
                key = (command.project, command.request.job)
                reply: JobReply | ErrorReply
                try:
                    first = rows[key] is before[key]
                    rows[key] = await self._judge(unit, rows[key], command, now, first=first)
                    counts = await jobstore.counts(connection, command.project, [key[1]])
                    info = leases.info_of(rows[key], counts[key[1]])
                    reply = JobReply(request_id=command.request.request_id, job=info)
                except DsecError as exc:
                    request_id = command.request.request_id
                    reply = ErrorReply(error=to_wire(exc), request_id=request_id)
                if command.reply_to:
                    unit.replies.append(Outgoing(command.reply_to, encode(reply)))
            changed = [row for key, row in rows.items() if row is not before[key]]
            await jobstore.save(connection, changed)

    async def _judge(
        self, unit: Unit, row: leases.Job, command: JobCommand, now: float, *, first: bool
    ) -> leases.Job:
        if command.verb == "renew":
            held = leases.renewed(row, command.request, at=now)
        else:
            held = leases.opened(row, command.request, principal=command.principal, at=now)
        if row.state != leases.LAPSED or row.on_lost != "pause":
            return held
        if not first:  # of this batch: the rows are ours already
            return leases.lost_still(held, before=row)
        return await self._revive(unit, row, held)

    async def _revive(self, unit: Unit, lost: leases.Job, held: leases.Job) -> leases.Job:
        """Somebody holds it again, and may wait for commands that the loss froze: to follow
        what was begun wakes nothing, so only this lets them go on."""
        rows = await jobstore.lock_paused_by_loss(unit.connection, lost, by=BY)
        unit.changes.load(rows)
        paused = [row for row in rows if row.state == lifecycle.PAUSED]
        for row in paused:
            decide.ask(
                unit.changes, row, "resume", at=time.time(), by=BY, deadlines=self._work.deadlines
            )
        return held if len(paused) == len(rows) else leases.lost_still(held, before=lost)

    async def lapse(self) -> int:
        """A portion of the leases that ran out: their jobs are lost. Not before this
        scheduler has heard the bus for as long as a lease takes: after an outage of the
        control plane, or of this process, every lease is old, and every trainer may be
        alive."""
        self._look()
        async with self._db.transaction() as connection:
            now = time.time()
            limit = self._settings.reconcile_rows
            before = now - self._settings.lease_late_s
            found = await jobstore.lock_lapsing(connection, before, limit)
            lost = [j for j in found if self._has_listened(j.lease_s)]
            await jobstore.save(connection, [leases.lapsed(j, at=now) for j in lost])
        for job in lost:
            log.warning("job %s of %s: nobody renews its lease", job.id, job.project)
        return len(lost)

    def _look(self) -> None:
        now = time.monotonic()
        gap_s, self._looked_at = now - self._looked_at, now
        if self._listening_since is None or not self._connected():
            self._listening_since = now
        if gap_s > self._settings.lease_late_s:
            self._gaps.append((now, gap_s))

    def _has_listened(self, lease_s: float) -> bool:
        """Whether nothing kept this scheduler from a renewal for the time of a lease."""
        late_s = self._settings.lease_late_s
        gaps = (at for at, gap_s in self._gaps if gap_s > late_s + STOOD * lease_s)
        since = max([self._listening_since or self._looked_at, *gaps])
        return self._looked_at - since >= lease_s + late_s

    async def pause_lost(self) -> int:
        """A portion of the sandboxes of lost jobs that are to be paused."""

        def pause(changes: Changes, row: Sandbox) -> None:
            decide.ask(
                changes, row, "pause", at=time.time(), by=BY,
                deadlines=self._work.deadlines,
            )  # fmt: skip

        return await self._each(jobstore.lock_to_pause, pause)

    async def stop_lost(self) -> int:
        """A portion of the sandboxes of lost jobs that are to be stopped."""

        def stop(changes: Changes, row: Sandbox) -> None:
            decide.stop(
                changes, row, at=time.time(), by=BY, cause="job_lost",
                deadlines=self._work.deadlines, message=f"nobody holds job {row.job}",
            )  # fmt: skip

        return await self._each(jobstore.lock_to_stop, stop)

    async def _each(
        self,
        lock: Callable[[AsyncConnection, int], Awaitable[list[Sandbox]]],
        change: Callable[[Changes, Sandbox], None],
    ) -> int:
        """Changes a portion of the rows that ``lock`` finds; returns how many."""
        async with self._work.unit() as unit:
            rows = await lock(unit.connection, self._settings.reconcile_rows)
            unit.changes.load(rows)
            for row in rows:
                change(unit.changes, row)
        return len(rows)

    async def page(self, query: JobQuery, _: Incoming) -> JobPage:
        """One page of a project's jobs."""
        async with self._db.transaction() as connection:
            rows = await jobstore.page(connection, query, query.limit + 1)
            more = len(rows) > query.limit
            rows = rows[: query.limit]
            counts = await jobstore.counts(connection, query.project or "", [r.id for r in rows])
        return JobPage(
            jobs=[leases.info_of(r, counts[r.id]) for r in rows],
            next=rows[-1].id if more else None,
        )

