"""What must happen without any message: deadlines, lost and draining nodes.

Owns: the periodic passes, in bounded portions with ``skip locked``, so that two
schedulers share the work. Does not own: what is done to a row (``decide``).
"""

from __future__ import annotations

import time
from functools import partial

from services.scheduler import decide, operating, requests, retention, sending, store
from services.scheduler.fleet import Fleet
from services.scheduler.jobs import Jobs
from services.scheduler.work import Work
from shared.db import Database
from shared.periodic import Periodic, portions

MAX_PORTIONS = 64
"""Portions of one pass; the rest waits for the next."""


class Reconciler:
    """Runs between :meth:`start` and :meth:`close`; :meth:`once` is one pass."""

    def __init__(self, work: Work, db: Database, fleet: Fleet, jobs: Jobs) -> None:
        self._work = work
        self._db = db
        self._jobs = jobs
        self._settings = work.settings
        self._fleet = fleet
        self._loops = [
            Periodic("reconcile", self.once, every_s=work.settings.reconcile_s),
            Periodic("queue", self.waiting, every_s=work.settings.wait_look_s, soon=work.room),
            Periodic("forget", self.forget, every_s=work.settings.forget_s),
        ]

    def start(self) -> None:
        """Begins in the background."""
        for loop in self._loops:
            loop.start()

    async def close(self) -> None:
        """Ends; a pass at work is rolled back."""
        for loop in self._loops:
            await loop.close()

    async def once(self) -> int:
        """One pass over everything that is due; returns the rows touched."""
        total = 0
        jobs = self._jobs
        passes = (
            self.overdue, self.unanswered, self.lost, self.draining,
            jobs.lapse, jobs.pause_lost, jobs.stop_lost,
        )  # fmt: skip
        for portion in passes:
            rows = self._settings.reconcile_rows
            total += await portions(portion, size=rows, most=MAX_PORTIONS)
        return total

    async def overdue(self) -> int:
        """A portion of the rows whose deadline has passed."""
        async with self._work.unit() as unit:
            now = time.time()
            rows = await store.lock_overdue(unit.connection, now, self._settings.reconcile_rows)
            unit.changes.load(rows)
            for row in rows:
                decide.overdue(unit.changes, row, now=now, deadlines=self._work.deadlines)
        return len(rows)

    async def unanswered(self) -> int:
        """Answers a portion of the operations that wait for silent nodes."""
        async with self._work.unit() as unit:
            rows = self._settings.reconcile_rows
            found = await requests.take_silent_ops(unit.connection, rows)
            for request_id, reply_to, uids, settled in found:
                if reply_to:
                    results = await self._work.results(unit, uids, settled)
                    told = [operating.unanswered(r) for r in results]
                    unit.replies += sending.op_replies(reply_to, request_id, told)
        return len(found)

    async def lost(self) -> int:
        """A portion of the sandboxes of nodes that have been lost for the grace."""
        async with self._work.unit() as unit:
            now = time.time()
            before = now - self._settings.lost_grace_s
            limit = self._settings.reconcile_rows
            rows = await store.lock_on_gone_nodes(unit.connection, before, limit)
            unit.changes.load(rows)
            for row in rows:
                message = f"node {row.node} has been silent for too long"
                decide.lost(unit.changes, row, at=now, message=message)
        return len(rows)

    async def draining(self) -> int:
        """A portion of the sandboxes that draining nodes still run."""
        async with self._work.unit() as unit:
            now = time.time()
            rows = await store.lock_on_draining(unit.connection, self._settings.reconcile_rows)
            unit.changes.load(rows)
            for row in rows:
                decide.stop(
                    unit.changes, row, at=now, by="operator", cause="node_lost",
                    deadlines=self._work.deadlines, grace_s=self._settings.drain_grace_s,
                    message=f"node {row.node} is being drained",
                )  # fmt: skip
        return len(rows)

    async def waiting(self) -> int:
        """Places those that wait for room, as far as there is some; returns how many."""
        async with self._db.transaction() as connection:
            queue = self._work.queue = await store.queue(connection)
        placed = skip = 0
        for _ in range(MAX_PORTIONS):
            if skip >= queue.total or not self._fleet.room(queue.cores, queue.memory_mb):
                break
            async with self._work.unit() as unit:
                rows = await self._work.load_queue(unit, skip=skip)
            still = sum(decide.waits(unit.changes.rows[r.uid]) for r in rows)
            placed += len(rows) - still
            skip += still
            if len(rows) < self._settings.reconcile_rows:
                break
        return placed

    async def forget(self) -> int:
        """Removes what is past its use, in small transactions; returns the rows."""
        keep_s, rows = self._settings.keep_ended_s, self._settings.reconcile_rows
        total = 0
        for prune, age_s in (
            (retention.operations, self._settings.op_keep_s),
            (retention.ended, keep_s), (retention.requests, keep_s),
            (retention.jobs, self._settings.job_keep_s),
            (retention.nodes, self._settings.node_keep_s),
        ):  # fmt: skip
            portion = self._db.portion(partial(prune, keep_s=age_s, limit=rows))
            total += await portions(portion, size=rows, most=MAX_PORTIONS)
        return total
