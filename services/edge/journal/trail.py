"""The trajectory log of this node's sandboxes: told to the services, answered to clients.

Owns: what a record says, that each gets to the services whatever dies in between, pages
of records. Does not own: intents and results themselves, which the journal keeps once,
for the log and for repetition (:mod:`execs`).

Nobody waits for records: they are gathered for ``LINGER_S``, so that most commands are
told with their result, in one record. What did not fit into memory, or was left by an
earlier process, is read from the journal again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from schemas.base import encode
from schemas.subjects import trj
from schemas.trajectory import NOTE_BYTES, TrajectoryRequest
from services.edge.door.calls import Call
from services.edge.door.operation import Operation
from services.edge.drivers.base import Stream
from services.edge.journal import records
from services.edge.journal.claims import Claim
from services.edge.journal.execs import Execs
from services.edge.journal.fitting import fitted, room
from services.edge.journal.journal import Journal
from services.edge.journal.logged import Logged
from services.edge.journal.outputs import Outputs, Spooled
from services.edge.journal.records import ExecRow, Told
from services.edge.link import Link
from services.edge.sandbox.actor import Sandbox
from shared.bus import Outgoing
from shared.errors import DsecError, InvalidRequest, Unavailable
from shared.trajectory import NONE, Page, Record, Records, page_of

log = logging.getLogger(__name__)

CLOCK_REALTIME_COARSE = 5  # linux/time.h; Python has no name for it
LINGER_S = 0.5
MAX_WAITING_BYTES = 32 << 20
"""Records that wait in memory; more are read from the journal when these are told."""
BATCH = 500
BATCH_BYTES = 1024 * 1024
"""Records of one message: more begin the next one."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0
SETTLE_S = 2.0

MAX_LOGGED_NOTE_BYTES = NOTE_BYTES * 4 // 3 + 1024
"""A note is kept as a whole: its content in base64, and the rest of it."""

Key = tuple[str, int]
"""Sandbox and number."""
Spool = Callable[[Record, Stream], Spooled]
_decoder = msgspec.json.Decoder(Record)
COUNTED = ("cut", "lost")
"""Of the records: told with less than they hold, and taken in no form."""


class Trail:
    """``request_bytes``: a larger request is not kept, only its size, but for notes.
    ``output_bytes`` are kept of each stream, fewer where the bus takes smaller messages.
    ``on`` false: no operation gets a record."""

    def __init__(
        self, *, node: str, link: Link, journal: Journal, execs: Execs, output_bytes: int,
        request_bytes: int, outputs: Outputs, on: bool = True,
    ) -> None:  # fmt: skip
        self._outputs = outputs
        self._node = node
        self._link = link
        self._journal = journal
        self._execs = execs
        self._output_bytes = output_bytes
        self._request_bytes = request_bytes
        self._on = on
        self.counts: Counter[str] = Counter()
        self._waiting: dict[Key, tuple[Record, int]] = {}  # and its size
        self._waiting_bytes = 0
        self._wake = asyncio.Event()
        self._wake.set()
        self._behind = True
        self._telling = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to tell; the journal must have been started."""
        self._task = asyncio.create_task(self._run(), name="trail")

    async def flush(self) -> None:
        """One try to tell what waits, for an orderly end."""
        with contextlib.suppress(DsecError):
            await self._tell()

    async def settle(self, uid: str, running: Collection[asyncio.Task[None]]) -> None:
        """Tells at once what is known of a sandbox whose end is about to be told, its last
        operations, which end with it, among it: its log is whole for who asks after that. What
        takes longer than ``SETTLE_S`` is told later, as ever."""
        try:
            async with asyncio.timeout(SETTLE_S):
                if running:
                    await asyncio.wait(running)
                if any(key[0] == uid for key in self._waiting):
                    await self._tell()
        except (DsecError, TimeoutError) as exc:
            log.info("the log of sandbox %s is told after its end: %r", uid, exc)

    async def close(self) -> None:
        """Ends; what is untold stays in the journal."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- what happens -----------------------------------------------------------------

    def claim(self, op: Operation, sandbox: Sandbox, request: Any, now: float) -> Claim:
        """The intent of a new operation, which gets the sandbox's next number."""
        seq = sandbox.numbers.next()
        record = self._record(op.call, request, seq, now) if self._on else None
        op.logged = self._logged(seq, record, spool=self._outputs.begin)
        body = encode(record) if record is not None else b""
        return Claim(sandbox.uid, op.op_id, op.hash, now, seq if record else 0, body)

    def unclaimed(self, op: Operation, sandbox: Sandbox) -> None:
        """Its intent could not be kept."""
        if op.logged.seq:
            sandbox.numbers.unused(op.logged.seq)

    def begun(self, op: Operation) -> None:
        """Its intent is kept."""
        if op.logged.record is not None:
            self._put(op.logged.record)

    def again(self, op: Operation, row: ExecRow, request: Any) -> None:
        """It was begun before. An earlier process may have died before the journal had
        its text."""
        record = _decoder.decode(row.record) if row.record is not None else None
        if record is None and row.seq and op.hash:
            record = self._record(op.call, request, row.seq)
            self._journal.post(records.exec_text(op.call.uid, op.op_id, encode(record)))
        op.logged = self._logged(row.seq, record)

    async def seal(self, op: Operation) -> None:
        """Its output is complete, unless it goes on without this process."""
        spooled = op.logged.spooled()
        if op.claimed and not op.left:
            op.logged.whole = await self._outputs.seal(spooled) if spooled else []
            return
        for one in spooled:
            one.drop()

    def ended(self, op: Operation, reply: bytes, at: float) -> None:
        """Its result is kept."""
        if (record := op.logged.record) is not None:
            self._put(msgspec.structs.replace(record, reply=msgspec.Raw(reply), ended_at=at))

    async def kept(self, op: Operation) -> None:
        """Returns when the journal has its intent and text. Raises ``Unavailable``."""
        row = await self._execs.find(op.call.uid, op.op_id)
        if row is None or row.record is None:
            raise Unavailable("the journal could not be written", retry_after_s=1.0)

    def _record(
        self, call: Call, request: Any, seq: int, begun_at: float | None = None
    ) -> Record:
        body = encode(request)
        most = min(self._request_bytes, self._link.payload_limit() // 2)
        if call.verb == "note":
            most = MAX_LOGGED_NOTE_BYTES
        cut = len(body) if len(body) > most else 0
        return Record(
            uid=call.uid, project=call.project, seq=seq, op_id=request.op_id, verb=call.verb,
            principal=call.principal, at=_tick(), lane=request.lane, step=request.step,
            request=NONE if cut else msgspec.Raw(body), cut=cut, begun_at=begun_at,
        )  # fmt: skip

    def _logged(self, seq: int, record: Record | None, *, spool: Spool | None = None) -> Logged:
        limit = 0
        if record is not None:
            size = len(memoryview(record.request))
            limit = min(self._output_bytes, room(self._link.payload_limit(), size))
        return Logged(seq, record, limit=limit, spool=spool)

    def _put(self, record: Record) -> None:
        key = (record.uid, record.seq)
        if self._waiting_bytes >= MAX_WAITING_BYTES:
            self._behind = True
            self._drop(key)  # the journal has a newer one, or will
            return
        size, before = record.size, self._waiting.get(key)
        self._waiting_bytes += size - (before[1] if before else 0)
        self._waiting[key] = record, size
        if not self._wake.is_set():
            self._wake.set()

    def _drop(self, key: Key) -> None:
        if (found := self._waiting.pop(key, None)) is not None:
            self._waiting_bytes -= found[1]

    # -- telling ----------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = BACKOFF_MIN_S
        while True:
            if not self._waiting and not self._behind:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(LINGER_S)
            try:
                await self._tell()
                if self._behind and not self._waiting:
                    await self._catch_up()
                backoff_s = BACKOFF_MIN_S
            except Unavailable as exc:
                log.debug("trajectory records wait: %s", exc.message)
                await asyncio.sleep(backoff_s)
                backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
            except Exception:
                log.exception("trajectory records wait")
                await asyncio.sleep(BACKOFF_MAX_S)

    async def _catch_up(self) -> None:
        self._execs.tell()
        self._behind = False  # what finds no room from here on makes it true again
        try:
            found, more = await self._journal.run(_untold)
        except BaseException:
            self._behind = True
            raise
        self._behind = self._behind or more
        for record in filter(None, map(record_of, found)):
            if (record.uid, record.seq) not in self._waiting:
                self._put(record)
        unreadable = [(uid, seq) for uid, seq, body, _, _ in found if body is None]
        if unreadable:  # the process died before the journal had their texts
            self._journal.post(*records.told(records.RESULT_TOLD, unreadable))

    async def _tell(self) -> None:
        async with self._telling:  # what two told at once would be told twice
            await self._tell_all()

    async def _tell_all(self) -> None:
        while self._waiting:
            self._execs.tell()  # first the intents, then that they are told
            batch = self._batch()
            await self._store(batch)
            for told_to, ended in ((records.INTENT_TOLD, False), (records.RESULT_TOLD, True)):
                keys = [(r.uid, r.seq) for r in batch if (r.ended_at is not None) is ended]
                if keys:
                    self._journal.post(*records.told(told_to, keys))
            for record in batch:
                key = record.uid, record.seq
                if (found := self._waiting.get(key)) is not None and found[0] is record:
                    self._drop(key)

    async def _store(self, batch: list[Record]) -> None:
        """Returns when the stream has them. A message that the bus does not take is sent in
        parts, one record at least in part: a server that nobody configured takes less than
        ours."""
        data = encode(Records(node=self._node, records=batch))
        try:
            await self._link.bus.store([Outgoing(trj(self._node), data)])
        except InvalidRequest as exc:
            middle = len(batch) // 2
            if middle:
                await self._store(batch[:middle])
                await self._store(batch[middle:])
                return
            short = fitted(batch[0], self._link.payload_limit())
            cut = short is not batch[0]
            self.counts["cut" if cut else "lost"] += 1
            how = "told in part" if cut else "lost"
            log.error("record %d of %s is %s: %s", batch[0].seq, batch[0].uid, how, exc.message)
            if cut:
                await self._store([short])

    def _batch(self) -> list[Record]:
        batch: list[Record] = []
        left = BATCH_BYTES
        for record, size in self._waiting.values():
            left -= size
            if batch and (left < 0 or len(batch) == BATCH):
                break
            batch.append(record)
        return batch

    # -- asking -----------------------------------------------------------------------

    async def page(self, sandbox: Sandbox, request: TrajectoryRequest, op: Operation) -> Page:
        """verb ``trajectory``: what the journal has. Raises ``Unavailable``."""
        uid, last = sandbox.uid, sandbox.numbers.last
        self._execs.tell()  # of what just began

        limit = self._link.payload_limit()

        def read(db: sqlite3.Connection) -> tuple[list[Record], bool]:
            found = map(record_of, records.trajectory(db, uid, request.after))
            return page_of((fitted(r, limit) for r in found if r is not None), request.limit)

        found, more = await self._journal.run(read)
        return Page(records=found, more=more, last=last, op_id=op.op_id)


def _untold(db: sqlite3.Connection) -> tuple[list[Told], bool]:
    """As much as fits into memory of what is to be told, and whether there is more."""
    found: list[Told] = []
    left = MAX_WAITING_BYTES // 2
    for row in records.untold(db):
        found.append(row)
        left -= len(row[2] or b"") + len(row[3] or b"")
        if left < 0:
            return found, True
    return found, False


def record_of(row: Told) -> Record | None:
    """The record in a row of the journal; ``None`` where the intent's text is missing."""
    _, _, body, reply, ended_at = row
    if body is None:
        return None
    record = _decoder.decode(body)
    if reply is None:
        return record
    return msgspec.structs.replace(record, reply=msgspec.Raw(reply), ended_at=ended_at)


def _tick() -> float:
    """Now, by the clock that stamps files: no file that is changed from now on carries an
    earlier time."""
    return time.clock_gettime(CLOCK_REALTIME_COARSE)
