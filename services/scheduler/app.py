"""The scheduler put together: the only place that knows all its parts.

Owns: construction, the order of start and end, keeping the topology declared.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial

from schemas.burst import BurstPlan
from schemas.hotset import EnvironmentsQuery
from schemas.iam import IamQuery
from schemas.image import ImageChanged, LayerUseQuery, OriginQuery
from schemas.job import JobQuery
from schemas.node import Heartbeat, JoinRequest
from schemas.sandbox import EndedQuery, SandboxQuery
from schemas.streams import EDGE_DURABLE, durable
from schemas.subjects import hb, join, rpc
from services.scheduler import nodes
from services.scheduler.creates import Creates
from services.scheduler.fleet import Fleet
from services.scheduler.handlers import Handlers
from services.scheduler.images import Images
from services.scheduler.jobs import Jobs
from services.scheduler.ops import Ops
from services.scheduler.questions import Questions
from services.scheduler.reconcile import Reconciler
from services.scheduler.settings import Settings
from services.scheduler.tally import COUNTED
from services.scheduler.watcher import Watcher
from services.scheduler.work import Work
from shared import topology
from shared.bus import Bus, Incoming
from shared.consumer import BatchConsumer
from shared.db import Database
from shared.errors import Unavailable
from shared.health import Health
from shared.loadview import LoadView
from shared.outbox import Outbox

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between looks whether the connection is a new one."""
QUEUE = "scheduler"


class App:
    """One scheduler. :meth:`start` returns when it works; :meth:`close` ends it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.bus = Bus(settings, "scheduler")
        self.db = Database(settings.pg_dsn, "scheduler")
        self.load = LoadView(settings.redis_url)
        self.outbox = Outbox(self.bus, self.db)
        self.fleet = Fleet(
            self.db, self.load, settings.view_refresh_s, share_s=settings.burst_share_s
        )
        self.images = Images(self.bus, settings.resolve_s)
        self.work = Work(settings, self.db, self.bus, self.outbox, self.fleet, self.images)
        self.jobs = Jobs(self.work, self.db, connected=self._connected)
        self.handlers = Handlers(self.work, Creates(self.work), Ops(self.work, self.db), self.jobs)
        self.watcher = Watcher(
            settings, self.db, self.load, connected=self._connected, more_room=self.work.more_room
        )
        self.reconciler = Reconciler(self.work, self.db, self.fleet, self.jobs)
        self.consumers = [
            BatchConsumer(self.bus, durable("scheduler_commands"), self.handlers.commands),
            BatchConsumer(self.bus, durable("scheduler_observations"), self.handlers.observations),
        ]
        self.health = Health("scheduler")
        self._topology: asyncio.Task[None] | None = None
        self._declared = False
        self._subscribe()

    def _connected(self) -> bool:
        return self.bus.client.is_connected

    def _subscribe(self) -> None:
        questions = Questions(self.settings, self.bus, self.db, self.fleet)
        self.bus.listen(hb("*"), Heartbeat, self.watcher.heard)
        self.bus.listen("dsec.evt.v1.burst.plan.*", BurstPlan, self._plan)
        self.bus.listen("dsec.evt.v1.imagesvc.image.*", ImageChanged, self.images.changed)
        self.bus.answer(join("*"), JoinRequest, questions.join, queue=QUEUE)
        self.bus.answer(
            rpc("scheduler", "sandboxes"), SandboxQuery, questions.sandboxes, queue=QUEUE
        )
        self.bus.answer(rpc("scheduler", "origin"), OriginQuery, questions.origin, queue=QUEUE)
        self.bus.answer(rpc("scheduler", "layers"), LayerUseQuery, questions.layers, queue=QUEUE)
        self.bus.answer(
            rpc("scheduler", "environments"), EnvironmentsQuery, questions.environments,
            queue=QUEUE,
        )  # fmt: skip
        self.bus.answer(rpc("scheduler", "ended"), EndedQuery, questions.ended, queue=QUEUE)
        self.bus.answer(rpc("scheduler", "jobs"), JobQuery, self.jobs.page, queue=QUEUE)
        self.bus.answer(rpc("scheduler", "nodes"), IamQuery, questions.nodes, queue=QUEUE)

    async def _plan(self, plan: BurstPlan, _: Incoming) -> None:
        self.fleet.burst(plan.share)

    async def start(self) -> None:
        """Connects, declares the topology (waiting for the bus as long as it
        takes), then begins to work. Raises ``Internal`` where the bus differs from
        its map."""
        await self.bus.start()
        while not await self._declare():  # noqa: ASYNC110 - the bus tells nobody
            await asyncio.sleep(LOOK_S)
        with contextlib.suppress(Unavailable):  # it is tried again all the time
            await self.fleet.refresh()
        self._topology = asyncio.create_task(self._keep_topology(), name="topology")
        self.outbox.start()
        self.fleet.start()
        self.watcher.start()
        self.reconciler.start()
        for consumer in self.consumers:
            consumer.start()
        self.health.add("bus", self.bus.check)
        self.health.add("database", self.db.ping)
        self.health.count("outbox_given_up", lambda: self.outbox.given_up)
        for name in COUNTED:
            self.health.count(f"sandboxes_{name}", partial(self.work.tally.__getitem__, name))
        self.health.add("topology", self._check_topology)
        for consumer in self.consumers:
            self.health.add(consumer.name, consumer.check)
        await self.health.serve(self.settings.health_port)

    async def close(self) -> None:
        """Finishes what is at hand and ends."""
        await self.health.close()
        await asyncio.gather(*(c.close() for c in self.consumers))
        if self._topology is not None:
            self._topology.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._topology
        for part in (self.reconciler, self.watcher, self.fleet, self.outbox):
            await part.close()
        await self.bus.close()
        await self.load.close()
        await self.db.close()

    async def _check_topology(self) -> None:
        if not self._declared:
            raise Unavailable("streams and durables are not declared")

    async def _declare(self) -> bool:
        self._declared = False
        try:
            await topology.declare(self.bus.js)
            async with self.db.transaction() as connection:
                known = [n.id for n in await nodes.every(connection) if n.state != "lost"]
            for node in known:
                await topology.declare_durable(self.bus.js, EDGE_DURABLE, node)
        except Unavailable as exc:
            log.warning("topology: %s", exc.message)
            return False
        self._declared = True
        return True

    async def _keep_topology(self) -> None:
        """Declares again after every reconnect (the server may have lost its store)
        and now and then (someone may have removed a part)."""
        loop = asyncio.get_running_loop()
        seen, at = self.bus.reconnects, loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            new = self.bus.reconnects
            due = new != seen or not self._declared
            due = due or loop.time() - at > self.settings.topology_s
            if not due or not self._connected():
                continue
            try:
                if await self._declare():
                    seen, at = new, loop.time()
            except Exception:
                log.exception("topology")


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Runs one scheduler until ``stop`` is set."""
    app = App(settings)
    try:
        await app.start()
        await app.bus.serve(stop)
    finally:
        await app.close()
