"""One transaction of the scheduler: decided changes → rows, reservations, messages.

Owns: the order of locks and writes, placement under locks, what is sent after the
commit. Does not own: decisions (``decide``, ``placement``) or statements (``store``,
``nodes``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import WireError, decode
from schemas.sandbox import ItemResult, ResolvedSpec, SandboxSpec
from services.scheduler import decide, nodes, requests, sending, store
from services.scheduler.fleet import Fleet
from services.scheduler.images import Images
from services.scheduler.model import Changes, Sandbox, result_of
from services.scheduler.placement import Amounts, Ask, NodeView, Placed, need_of, place_batch
from services.scheduler.sending import SpecKey
from services.scheduler.settings import Settings
from services.scheduler.tally import Tally
from services.scheduler.turns import Queue, Turns, full, too_many
from shared import db, telemetry
from shared.bus import Bus, Outgoing
from shared.db import Database
from shared.errors import DsecError
from shared.outbox import Outbox

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Unit:
    """A running transaction: its connection, its changes, what it will send.

    ``bodies`` are encoded specs known already; ``new`` the uids to be inserted;
    ``queue``: those that wait for room are in it already. ``freed``: what sandboxes that
    left their nodes give back, negative.
    """

    connection: AsyncConnection
    changes: Changes = field(default_factory=Changes)
    new: set[str] = field(default_factory=set)
    bodies: dict[SpecKey, bytes] = field(default_factory=dict)
    specs: dict[SpecKey, SandboxSpec] = field(default_factory=dict)
    replies: list[Outgoing] = field(default_factory=list)
    overlay: list[int] = field(default_factory=list)
    freed: Amounts = field(default_factory=dict)
    queue: bool = False


class Work:
    """Runs units. Use: ``async with work.unit() as unit: …; await work.write(unit)``;
    everything is sent when the block has ended well."""

    def __init__(
        self, settings: Settings, db: Database, bus: Bus, outbox: Outbox, fleet: Fleet,
        images: Images, *, rng: random.Random | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.images = images
        self.deadlines = decide.Deadlines(
            start_again_s=settings.start_again_s,
            op_again_s=settings.op_again_s,
            missing_s=settings.missing_s,
            attempts=settings.placement_attempts, again_s=settings.refused_again_s,
        )
        self._db = db
        self._bus = bus
        self._outbox = outbox
        self._fleet = fleet
        self._rng = rng or random.Random()
        self.queue = Queue({})
        self.room = asyncio.Event()
        """Set when there may be more room than those that wait know of."""
        self._turns = Turns()
        self.tally = Tally()

    @contextlib.asynccontextmanager
    async def unit(self) -> AsyncIterator[Unit]:
        """One transaction; commits, counts and sends at its end."""
        sent: list[tuple[int, Outgoing]] = []
        unit: Unit | None = None
        try:
            async with self._db.transaction() as connection:
                unit = Unit(connection)
                yield unit
                sent = await self._write(unit)
        except BaseException:
            for key in unit.overlay if unit else ():
                self._fleet.abort(key)
            raise
        self.tally.add(unit.changes)
        for key in unit.overlay:
            self._fleet.commit(key)
        self._give_back(unit.freed)
        self._outbox.sent_by_me(sent)
        await self.reply(unit.replies)

    def _give_back(self, freed: Amounts) -> None:
        if freed:
            self._fleet.given_back(freed)
            if self.queue.total:
                self.room.set()

    async def more_room(self) -> None:
        """Nodes can take more, or other things, than they said before."""
        if self.queue.total:
            await self._fleet.refresh()
            self.room.set()

    async def reply(self, messages: Sequence[Outgoing]) -> None:
        """Sends answers. One that is lost is healed by the client's own reading."""
        for message in messages:
            try:
                await self._bus.send(message)
            except DsecError as exc:
                log.warning("a reply was not sent: %s", exc.message)

    async def _write(self, unit: Unit) -> list[tuple[int, Outgoing]]:
        c, changes = unit.connection, unit.changes
        if changes.place:
            await self._place(unit)
        changed = changes.changed()
        fresh = [r for r in changed if r.uid in unit.new]
        known = [r for r in changed if r.uid not in unit.new]
        await nodes.commit(c, nodes.deltas(changes.was, changed))
        unit.freed = nodes.deltas(changes.was, (r for r in changed if not r.on_node))
        await store.write(c, fresh, known, changes.was, changes.steps)
        await self._settle_ops(unit, changed)
        unit.replies += sending.create_replies(
            r for r in changed if sending.settles(changes.was.get(r.uid), r)
        )
        return await self._outbox.add(c, await self._messages(unit, changed))

    async def _messages(self, unit: Unit, changed: Sequence[Sandbox]) -> list[Outgoing]:
        changes, trace = unit.changes, telemetry.traceparent()
        starting = [
            r for r in changed
            if r.state == "placed" and _placed_now(changes.was.get(r.uid), r)
        ]  # fmt: skip
        starting += [changes.rows[uid] for uid in changes.again]
        await self._load_bodies(unit, starting)
        return (
            sending.starts(starting, unit.bodies, trace)
            + sending.node_ops(changes.ops, trace)
            + sending.events(changes.events, trace)
        )

    async def _load_bodies(self, unit: Unit, rows: Sequence[Sandbox]) -> None:
        wanted = {_key(r) for r in rows} - unit.bodies.keys()
        for key, (body, _, _) in (await requests.specs(unit.connection, wanted)).items():
            unit.bodies[key] = body

    async def _settle_ops(self, unit: Unit, changed: Sequence[Sandbox]) -> None:
        was = unit.changes.was
        counts = Counter(
            old.op_id
            for r in changed
            if (old := was.get(r.uid)) is not None and old.op_id and r.op_id != old.op_id
        )
        done = await requests.settle_ops(unit.connection, counts)
        for request_id, reply_to, uids, settled in done:
            if reply_to:
                results = await self.results(unit, uids, settled)
                unit.replies += sending.op_replies(reply_to, request_id, results)

    async def results(
        self, unit: Unit, uids: Sequence[str], settled: Sequence[ItemResult]
    ) -> list[ItemResult]:
        """Results of an operation: those known from the start, and the rows."""
        known = {r.uid: r for r in settled}
        rows = unit.changes.rows
        missing = [u for u in uids if u not in rows and u not in known]
        others = {r.uid: r for r in await store.find(unit.connection, missing)} if missing else {}
        out = []
        for uid in uids:
            row = rows.get(uid) or others.get(uid)
            if uid in known:
                out.append(known[uid])
            elif row is not None:
                out.append(result_of(row))
        return out

    async def _place(self, unit: Unit) -> None:
        await self._take_queue(unit)
        asks = await self._asks(unit)
        if not asks:
            return
        changes, now = unit.changes, time.time()
        placed = self._choose(asks, self._fleet.views())
        # what waits may go on waiting on a view that is half a second old
        failed = any(not decide.may_wait(changes.rows[uid], now) for uid in placed.failed)
        if failed or not await self._lock_fitting(unit, asks, placed):
            rows = await nodes.lock(unit.connection, None)
            placed = self._choose(asks, self._fleet.exact(rows))
        for uid, node in placed.nodes.items():
            decide.place(changes, changes.rows[uid], node, at=now, deadlines=self.deadlines)
        await self._unplaced(unit, placed, now)
        chosen = [changes.rows[uid] for uid in placed.nodes]
        self._turns.served((row.project for row in chosen), self.queue.counts)
        unit.overlay.append(self._fleet.begin(nodes.deltas({}, chosen)))

    async def _take_queue(self, unit: Unit) -> None:
        """Those that wait come along with what is new: nobody is overtaken."""
        queue = self.queue
        if unit.queue or not queue.total or not self._fleet.room(queue.cores, queue.memory_mb):
            return
        await self.load_queue(unit)

    async def load_queue(self, unit: Unit, *, skip: int = 0) -> list[Sandbox]:
        """Takes a portion of the queue into ``unit``, to be placed."""
        unit.queue = True
        rows = await store.lock_next(unit.connection, self.settings.reconcile_rows, skip=skip)
        rows = [r for r in rows if r.uid not in unit.changes.rows]
        unit.changes.load(rows)
        unit.changes.place += [r.uid for r in rows]
        return rows

    async def _unplaced(self, unit: Unit, placed: Placed, now: float) -> None:
        """They wait, as far as the queue's bounds allow, or end."""
        changes, settings, wanting = unit.changes, self.settings, []
        for uid, failure in placed.failed.items():
            row = changes.rows[uid]
            decide.unplaced(changes, row, failure, at=now, deadlines=self.deadlines)
            if decide.waits(changes.rows[uid]) and not decide.waits(row):
                wanting.append(changes.rows[uid])
        if not wanting:
            return
        queue = await store.queue(unit.connection)
        over = too_many(
            wanting, queue, limit=settings.wait_rows, project_limit=settings.wait_project_rows
        )
        for row in over:
            decide.reject(changes, row, full(placed.failed[row.uid].error, queue), at=now)
        self.queue = queue.plus([r for r in wanting if decide.waits(changes.rows[r.uid])])

    def _choose(self, asks: Sequence[Ask], views: Sequence[NodeView]) -> Placed:
        return place_batch(
            asks, views, self._rng,
            choices=self.settings.placement_choices,
            cloud_share=self._fleet.cloud_share,
            retry_after_s=self.settings.retry_after_s,
        )  # fmt: skip

    async def _lock_fitting(self, unit: Unit, asks: Sequence[Ask], placed: Placed) -> bool:
        """Locks the chosen nodes (and those that give something back). ``False``,
        with nothing locked, where the choice does not fit what they have."""
        released = nodes.deltas(unit.changes.was, unit.changes.changed())
        await db.execute(unit.connection, "savepoint choice")  # what is locked goes with it
        rows = await nodes.lock(unit.connection, {*placed.nodes.values(), *released})
        views = {v.id: v for v in self._fleet.exact(rows)}
        for ask in asks:
            if ask.uid in placed.failed:
                continue
            view = views.get(placed.nodes[ask.uid])
            if view is None or not view.ready or not view.fits(ask.cores, ask.memory_mb):
                await db.execute(unit.connection, "rollback to savepoint choice")
                return False
            view.add(ask.cores, ask.memory_mb)
        return True

    async def _asks(self, unit: Unit) -> list[Ask]:
        rows = self._turns.order(unit.changes.rows[uid] for uid in unit.changes.place)
        errors = await self._load_specs(unit, rows)
        now, out = time.time(), []
        for row in rows:
            key = _key(row)
            spec, error = unit.specs.get(key), errors.get(key)
            if error is not None:
                decide.reject(unit.changes, row, error, at=now)
            elif spec is None:  # imagesvc is away: the reconciler tries again
                decide.later(unit.changes, row, at=now + self.settings.reconcile_s)
            else:
                out.append(Ask(row.uid, need_of(spec, row.tried), row.cores, row.memory_mb))
        return out

    async def _load_specs(self, unit: Unit, rows: Sequence[Sandbox]) -> dict[SpecKey, WireError]:
        """Loads the specs of rows that were created earlier, and resolves those whose
        images could not be resolved then; returns what is wrong with some."""
        found = await requests.specs(unit.connection, {_key(r) for r in rows} - unit.specs.keys())
        open_: dict[SpecKey, tuple[SandboxSpec, list[str]]] = {}
        for key, (body, resolved, projects) in found.items():
            spec = decode(body, ResolvedSpec).spec
            if resolved:
                unit.bodies[key], unit.specs[key] = body, spec
            else:
                open_[key] = (spec, projects)
        if not open_:
            return {}
        answers = await self.images.resolve(open_)
        for key, (answer, _) in answers.items():
            if answer is not None:
                unit.bodies[key], unit.specs[key] = answer, open_[key][0]
        done = {k: (body, True) for k, (body, _) in answers.items() if body is not None}
        await requests.put_specs(unit.connection, done)
        return {k: error for k, (_, error) in answers.items() if error is not None}


def _key(row: Sandbox) -> SpecKey:
    return (row.request_id or "", row.spec_idx)


def _placed_now(was: Sandbox | None, row: Sandbox) -> bool:
    return was is None or was.placed_generation != row.placed_generation
