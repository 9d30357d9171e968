"""What the edge tells the others: observations and access records.

Owns: that each is published at least once, whatever dies in between, coalesced, in
order. Does not own: what was observed.

A record is journalled with the change it reports, published in the next batch, and
leaves the journal when the stream has stored it. A batch is whatever waits. What was
observed waits for more while sandboxes start, not for long: sandboxes that are started
together are told of together, which leaves the cores to those that still start. Access
records always wait: nobody waits for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from schemas.audit import Access, AccessRecords
from schemas.base import decode, encode, portions
from schemas.sandbox import EdgeObservations, Observation
from schemas.subjects import evt_edge
from services.edge.journal import records
from services.edge.journal.journal import Journal
from services.edge.journal.records import Change
from services.edge.link import Link
from shared.bus import Outgoing
from shared.errors import DsecError, Unavailable

log = logging.getLogger(__name__)

MAX_BATCH = 1_000
MAX_UNSENT = 200_000
"""Access records kept while the bus is away; more are dropped and counted."""
ACCESS_LINGER_S = 0.5
STARTS_LINGER_S = 0.02
"""Longest wait of an observation while sandboxes start."""
BACKOFF_MIN_S, BACKOFF_MAX_S = 0.1, 5.0

OBSERVATIONS, ACCESS = "sandbox", "access"


@dataclass(frozen=True, slots=True)
class _Lane:
    """``linger``: how long what waits is to wait for more."""

    kind: str
    linger: Callable[[], Awaitable[object]]
    render: Callable[[list[bytes]], bytes]


class Publisher:
    """Publishes one kind of record in order."""

    def __init__(self, lane: _Lane, *, node: str, link: Link, journal: Journal) -> None:
        self._lane = lane
        self._node = node
        self._link = link
        self._journal = journal
        self._waiting: deque[tuple[int, bytes]] = deque(records.load_outbox(journal.db, lane.kind))
        self._earlier = len(self._waiting)
        self._wake = asyncio.Event()
        self._publishing = asyncio.Lock()
        self.dropped = 0

    def put(self, row: int, data: bytes) -> None:
        """Publishes a record that is journalled."""
        self._waiting.append((row, data))
        self._wake.set()

    @property
    def unsent(self) -> int:
        """Records that the bus has not stored yet."""
        return len(self._waiting)

    async def run(self) -> None:
        """Publishes until cancelled."""
        backoff_s = BACKOFF_MIN_S
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await self._lane.linger()
            try:
                await self._publish()
                backoff_s = BACKOFF_MIN_S
            except Unavailable as exc:
                log.debug("%s records wait: %s", self._lane.kind, exc.message)
                await asyncio.sleep(backoff_s)
                backoff_s = min(BACKOFF_MAX_S, backoff_s * 2)
            except Exception:
                log.exception("%s records wait", self._lane.kind)
                await asyncio.sleep(BACKOFF_MAX_S)

    async def flush(self) -> None:
        """One try to publish what waits, for an orderly end."""
        with contextlib.suppress(DsecError):
            while self._waiting:
                await self._publish()

    async def _publish(self) -> None:
        async with self._publishing:
            await self._publish_batch()

    async def _publish_batch(self) -> None:
        # what an earlier process left may be stored already, under the id of these rows alone
        size = min(MAX_BATCH, self._earlier or len(self._waiting))
        waiting = (data for _, data in itertools.islice(self._waiting, size))
        found = next(portions(waiting, count=MAX_BATCH), None)
        if found is None:
            return
        batch = list(itertools.islice(self._waiting, len(found)))
        data = self._lane.render(found)
        # rows are numbered once in the journal's life: the same batch, the same id
        msg_id = f"{self._node}-{self._lane.kind}-{batch[0][0]}-{batch[-1][0]}"
        subject = evt_edge(self._lane.kind, self._node)
        await self._link.bus.store([Outgoing(subject, data, msg_id=msg_id)])
        for _ in batch:
            self._waiting.popleft()
        self._earlier = max(0, self._earlier - len(batch))
        self._journal.post(*records.outbox_sent([row for row, _ in batch]))
        self._journal.flush()


class Observer:
    """The way out for observations and access records."""

    def __init__(self, *, node: str, epoch: str, link: Link, journal: Journal) -> None:
        self._journal = journal
        self._row = max(records.last_outbox(journal.db), _first_row(epoch))

        def observations(items: list[bytes]) -> bytes:
            decoded = [decode(item, Observation) for item in items]
            return encode(EdgeObservations(node=node, epoch=epoch, observations=decoded))

        def access(items: list[bytes]) -> bytes:
            written = cast(list[Access], [msgspec.Raw(item) for item in items])
            return encode(AccessRecords(source="edge", records=written))

        self.observations = Publisher(
            _Lane(OBSERVATIONS, self._linger, observations), node=node, link=link, journal=journal
        )
        self.access = Publisher(
            _Lane(ACCESS, lambda: asyncio.sleep(ACCESS_LINGER_S), access),
            node=node, link=link, journal=journal,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._expected = 0
        self._complete = asyncio.Event()

    def start(self) -> None:
        """Begins publishing."""
        for publisher in (self.observations, self.access):
            self._tasks.append(asyncio.create_task(publisher.run()))

    async def close(self) -> None:
        """Ends; what is unsent stays in the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def flush(self) -> None:
        """Publishes what waits, as far as the bus takes it now."""
        await self.observations.flush()
        await self.access.flush()

    async def emit(
        self, observations: Sequence[Observation], *changes: Change,
        first: Awaitable[None] | None = None,
    ) -> None:  # fmt: skip
        """Journals ``observations`` together with ``changes``, then publishes them, after
        ``first``. A journal that can't be written is logged: what was observed is true
        anyway and is still published."""
        rows = [(self._next(), encode(o)) for o in observations]
        inserts = [records.outbox(row, OBSERVATIONS, data) for row, data in rows]
        try:
            await self._journal.write(*changes, *inserts)
        except Unavailable as exc:
            log.error("not journalled: %s", exc.message)
        if first is not None:
            await first
        for row, data in rows:
            self.observations.put(row, data)

    @contextlib.contextmanager
    def expected(self) -> Iterator[None]:
        """While it lasts, an observation is about to come."""
        self._expected += 1
        self._complete.clear()
        try:
            yield
        finally:
            self._expected -= 1
            if not self._expected:
                self._complete.set()

    async def _linger(self) -> None:
        if self._expected:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), STARTS_LINGER_S)

    def accessed(
        self, access: Access, *changes: Change, done: Callable[[], None] | None = None
    ) -> None:
        """Journals an access record (and ``changes``) without waiting for the commit;
        ``done`` is called after it."""
        if self.access.unsent >= MAX_UNSENT:
            self.access.dropped += 1
            log.error("%d access records dropped: the bus is away", self.access.dropped)
            self._journal.post(*changes, done=done)
            return
        row, data = self._next(), encode(access)
        self._journal.post(*changes, records.outbox(row, ACCESS, data), done=done)
        self.access.put(row, data)

    def _next(self) -> int:
        self._row += 1
        return self._row


def _first_row(epoch: str) -> int:
    """Rows of a new process begin above those of all earlier ones, though the outbox
    is empty in between: a number names one record for the stream's duplicate window.
    ``epoch`` is the start's time in milliseconds, in base 36."""
    return int(epoch, 36) << 20
