"""What must happen without any message: deadlines, lost and draining nodes.

Owns: the periodic passes, in bounded portions with ``skip locked``, so that two
schedulers share the work. Does not own: what is done to a row (``decide``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from services.scheduler import decide, jobstore, requests, store
from services.scheduler.jobs import Jobs
from services.scheduler.work import Work
from shared.db import Database
from shared.errors import Unavailable

log = logging.getLogger(__name__)

FORGET_EVERY = 60
"""Passes between removals of what is past its use."""
MAX_PORTIONS = 64
"""Portions of one pass; the rest waits for the next."""


class Reconciler:
    """Runs between :meth:`start` and :meth:`close`; :meth:`once` is one pass."""

    def __init__(self, work: Work, db: Database, jobs: Jobs) -> None:
        self._work = work
        self._db = db
        self._jobs = jobs
        self._settings = work.settings
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins in the background."""
        self._task = asyncio.create_task(self._run(), name="reconcile")

    async def close(self) -> None:
        """Ends; a pass at work is rolled back."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _run(self) -> None:
        count = 0
        while True:
            try:
                await self.once()
                if count % FORGET_EVERY == 0:
                    await self._forget()
                count += 1
            except Unavailable as exc:
                log.warning("reconcile: %s", exc.message)
            except Exception:
                log.exception("reconcile")
            await asyncio.sleep(self._settings.reconcile_s)

    async def once(self) -> int:
        """One pass over everything that is due; returns the rows touched."""
        total = 0
        jobs = self._jobs
        passes = (
            self.overdue, self.lost, self.draining, jobs.lapse, jobs.pause_lost, jobs.stop_lost
        )  # fmt: skip
        for portion in passes:
            for _ in range(MAX_PORTIONS):
                done = await portion()
                total += done
                if done < self._settings.reconcile_rows:
                    break
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

    async def _forget(self) -> None:
        async with self._db.transaction() as connection:
            await requests.forget_ops(connection, self._settings.op_keep_s)
            await jobstore.forget(connection, self._settings.job_keep_s)
