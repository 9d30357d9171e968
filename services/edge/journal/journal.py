"""The edge's memory over restarts: one SQLite file, one thread that writes it.

Owns: the file, its version, batching, what happens when it is damaged. Does not own:
tables and statements (:mod:`records`), what they mean (supervisor, observer, door).

Durability: WAL with ``synchronous=NORMAL``. A commit then survives the death of this
process (the pages are the kernel's) but perhaps not a loss of power. That is enough:
a loss of power ends every sandbox on the node too, and an older journal only names
sandboxes that the drivers then report as gone. FULL would cost an fsync a batch on the
way of every create and exec.

The thread takes whatever waits and makes one transaction of it, so a burst costs one
commit; callers wait for the commit of their batch. Changes that nobody waits for are
gathered for ``LINGER_S``: each time the thread wakes up it competes for the interpreter
with the loop, and does so again after every statement. So rows that are only added go
many to a statement. Commands have row ids, so that what is written together lies together:
in the order of sandboxes a transaction wrote more pages, for half as much CPU again. A file
that was made in that order stays so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from services.edge.journal import pruning, records
from services.edge.journal.adding import apply
from services.edge.journal.records import Change
from shared.errors import Internal, Unavailable

log = logging.getLogger(__name__)

BATCH = 512
MAX_WAITING = 50_000
PRUNE_S, SHED_S = 300.0, 5.0
BUSY_S = 5.0
LINGER_S = 0.05
"""How long changes that nobody waits for are gathered,"""
MAX_POSTED = 1_000
"""and how many."""
RESERVE_BYTES = 6 << 20
"""What can still be journalled when a sandbox has filled the node's disk, so that
commands run on and stops are kept; more than SQLite's log grows to on its own."""

T = TypeVar("T")
Work = Callable[[sqlite3.Connection], T]


class _Job(Generic[T]):
    """``work`` that somebody waits for, or ``changes`` that nobody does."""

    __slots__ = ("changes", "done", "error", "future", "result", "work")

    def __init__(
        self, work: Work[T] | None, future: asyncio.Future[T] | None = None,
        changes: Sequence[Change] = (), done: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.work = work
        self.future = future
        self.changes = changes
        self.done = done
        self.result: T | None = None
        self.error: Exception | None = None


class Journal:
    """Opens ``path``; :meth:`start` begins writing. A damaged file is moved aside with
    a log entry: the edge then goes on with an empty one, and the drivers' sweep removes
    the sandboxes nobody knows any more."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = _open(path)
        self._jobs: queue.SimpleQueue[list[_Job[Any]] | None] = queue.SimpleQueue()
        self._given = self._taken = 0  # jobs, by the loop and by the thread
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._posted: list[_Job[Any]] = []

    def reader(self) -> sqlite3.Connection:
        """Another connection, for reading what is committed. Raises ``sqlite3.Error``."""
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        return sqlite3.connect(address, uri=True, timeout=0.0, isolation_level=None)

    def start(self) -> None:
        """Begins writing. Read :attr:`db` before; afterwards it is the thread's."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Commits what waits, then closes the file."""
        if self._thread is not None:
            self.flush()
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self.db.close()

    async def check(self) -> None:
        """A health check: a commit."""
        await self.run(lambda db: None)

    async def write(self, *changes: Change) -> None:
        """Returns when the changes are committed, together. Raises ``Unavailable``."""
        await self.run(lambda db: apply(db, changes))

    async def run(self, work: Work[T]) -> T:
        """``work`` inside a transaction of the journal's thread. It may be run twice
        (alone, after its batch failed), so it changes nothing but the database."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._put(_Job(work, future))
        return await future

    def post(self, *changes: Change, done: Callable[[], None] | None = None) -> None:
        """Changes whose commit nobody waits for; in order with all others. ``done`` is
        called once they are committed."""
        self._check()
        if not self._posted and self._loop is not None:
            self._loop.call_later(LINGER_S, self.flush)
        self._posted.append(_Job(None, changes=changes, done=done))
        if len(self._posted) >= MAX_POSTED:
            self.flush()

    def flush(self) -> None:
        """Has what was posted committed now: what was published is not to be published
        again, for one."""
        posted, self._posted = self._posted, []
        if posted and self._thread is not None:
            self._give(posted)

    def _put(self, job: _Job[Any]) -> None:
        self._check()
        self._posted.append(job)
        self.flush()

    def _give(self, jobs: list[_Job[Any]]) -> None:
        """All at once: each time that something is there the thread asks for the interpreter."""
        self._given += len(jobs)
        self._jobs.put(jobs)

    def _check(self) -> None:
        if self._thread is None:
            raise Unavailable("the journal is closed")
        if self._given - self._taken >= MAX_WAITING:
            raise Unavailable("the journal is overloaded", retry_after_s=1.0)

    def _run(self) -> None:
        pruned_at = shed_at = time.monotonic()
        open_ = True
        while open_:
            given, jobs = self._jobs.get(), list[_Job[Any]]()
            with contextlib.suppress(queue.Empty):
                while given is not None:
                    jobs += given
                    if len(jobs) >= BATCH:
                        break
                    given = self._jobs.get_nowait()
            open_ = given is not None
            self._taken += len(jobs)
            now = time.monotonic()
            if now - pruned_at > PRUNE_S:
                pruned_at = shed_at = now
                jobs.append(_Job(None, changes=pruning.prune(time.time())))
            elif now - shed_at > SHED_S:
                shed_at = now
                jobs.append(_Job(None, changes=[pruning.shed()]))
            self._commit(jobs)

    def _commit(self, jobs: list[_Job[Any]]) -> None:
        try:
            self._transaction(jobs)
        except Exception as exc:
            if len(jobs) > 1:  # which one is at fault?
                for job in jobs:
                    self._commit([job])
                return
            for job in jobs:
                job.error = exc
                log.error("journal: not written: %r", exc)
        waiting = [job for job in jobs if job.future is not None or job.done is not None]
        if waiting and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is gone: so are the waiters
                self._loop.call_soon_threadsafe(_settle, waiting)

    def _transaction(self, jobs: list[_Job[Any]]) -> None:
        self.db.execute("begin immediate")
        try:
            posted: list[Change] = []
            for job in jobs:
                posted += job.changes
                if job.work is not None:
                    apply(self.db, posted)
                    posted.clear()
                    job.result = job.work(self.db)
            apply(self.db, posted)
            self.db.execute("commit")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("rollback")
            raise


def _settle(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        if job.done is not None and job.error is None:
            job.done()
        if job.future is None or job.future.done():
            continue
        if job.error is None:
            job.future.set_result(job.result)
        elif isinstance(job.error, sqlite3.Error):
            job.future.set_exception(Unavailable(f"the journal can't be written: {job.error}"))
        else:
            job.future.set_exception(job.error)


def _open(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        _for_its_owner_alone(path)
        return _opened(path)
    except (sqlite3.DatabaseError, OSError) as exc:
        if isinstance(exc, sqlite3.OperationalError | OSError):
            raise Internal(f"the journal {path} can't be opened: {exc}") from exc
        aside = _move_aside(path)
        log.error("the journal %s is damaged (%s): moved to %s, begun anew", path, exc, aside)
        return _opened(path)


def _for_its_owner_alone(path: Path) -> None:
    """Specs are in it, with their variables. What SQLite adds beside takes its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    for file in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        with contextlib.suppress(FileNotFoundError):
            file.chmod(0o600)


def _opened(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute("pragma journal_mode = wal")
        db.execute("pragma synchronous = normal")
        found = db.execute("pragma quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        version = _version(db)
        if version > records.SCHEMA_VERSION:
            raise Internal(f"the journal {path} is of a newer version: {version}")
        for older in range(version, records.SCHEMA_VERSION):
            for statement in records.UPGRADES[older]:
                db.execute(statement)
        db.executescript(records.SCHEMA)
        db.execute(
            "insert or replace into meta values ('version', ?)", (str(records.SCHEMA_VERSION),)
        )
        records.load_sandboxes(db)  # unreadable content is damage too
        _reserve(db)
    except ValueError as exc:
        db.close()
        raise sqlite3.DatabaseError(str(exc)) from exc
    except BaseException:
        db.close()
        raise
    return db


def _reserve(db: sqlite3.Connection) -> None:
    """Has the files own room for RESERVE_BYTES of changes: pages that are free, and a
    log whose blocks are written over again and again."""
    try:
        db.execute("create table if not exists reserve (filling blob)")
        db.execute("insert into reserve values (zeroblob(?))", (RESERVE_BYTES,))
        db.execute("delete from reserve")
        db.execute("pragma wal_checkpoint(passive)").fetchall()
    except sqlite3.OperationalError as exc:
        log.warning("the journal has no reserve: %s", exc)


def _version(db: sqlite3.Connection) -> int:
    if not db.execute("select 1 from sqlite_master where name = 'meta'").fetchone():
        return records.SCHEMA_VERSION
    row = db.execute("select value from meta where key = 'version'").fetchone()
    return int(row[0]) if row else records.SCHEMA_VERSION


def _move_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(aside.with_name(aside.name + suffix))
    return aside
