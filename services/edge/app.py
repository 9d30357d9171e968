"""The edge's composition root: the only place that knows all its parts.

Order: first the sandboxes (journal, drivers, re-adoption), then the bus. The node
serves what it has whether or not there is a bus, and a connection that ends for good
(expired or revoked rights) is replaced while the sandboxes live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from functools import partial
from typing import IO

from schemas.streams import EDGE_DURABLE
from schemas.subjects import inbox_prefix
from services.edge.door.door import Door
from services.edge.door.outcomes import COUNTED
from services.edge.drivers import registry
from services.edge.drivers.base import Driver
from services.edge.drivers.offers import offered
from services.edge.drivers.policing import Enforcing
from services.edge.handlers import Commands
from services.edge.heartbeat import Presence
from services.edge.journal import trail
from services.edge.journal.execs import Execs
from services.edge.journal.journal import Journal
from services.edge.journal.outputs import Outputs, Room
from services.edge.journal.trail import Trail
from services.edge.layers.client import LayerService
from services.edge.layers.locate import locator
from services.edge.layers.watch import Watch
from services.edge.link import Link
from services.edge.machine import probe
from services.edge.reports.excess import Excess
from services.edge.reports.observer import Observer
from services.edge.reports.violations import Teller
from services.edge.routes import Routes, parse
from services.edge.settings import Settings
from services.edge.supervisor import Bounds, Supervisor
from services.edge.vault import Vault
from shared.blobs.opening import is_remote
from shared.bus import Bus
from shared.clock import SystemClock
from shared.consumer import BatchConsumer
from shared.errors import Conflict
from shared.health import Health

log = logging.getLogger(__name__)

RECONNECT_S = 1.0
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


class Edge:
    """All parts, wired."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.epoch = _base36(time.time_ns() // 1_000_000)
        clock = SystemClock()
        settings.state_path.mkdir(parents=True, exist_ok=True)
        settings.state_path.chmod(0o700)  # specs and files of sandboxes are below it
        self._lock = lock(settings)
        self.link = Link()
        self.journal = Journal(settings.state_path / "journal.db")
        self.execs = Execs(self.journal)
        self.observer = Observer(
            node=settings.node, epoch=self.epoch, link=self.link, journal=self.journal
        )
        room = Room(settings.trajectory_whole_bytes, settings.trajectory_spool_bytes)
        self.outputs = Outputs(settings.state_path, node=settings.node, link=self.link, room=room)
        self.trail = Trail(
            node=settings.node, link=self.link, journal=self.journal, execs=self.execs,
            outputs=self.outputs, on=settings.trajectory,
            output_bytes=settings.trajectory_output_bytes,
            request_bytes=settings.trajectory_request_bytes,
        )  # fmt: skip
        layers = LayerService(settings.layers_path)
        self.watch = Watch(layers, node=settings.node, link=self.link)
        self.meter = probe.Meter(settings.state_path)
        limits = probe.limits(settings)
        self.routes = Routes(
            parse(settings.routes, bus=settings.nats_url), most=settings.connections_per_sandbox
        )
        self.violations = Teller(
            node=settings.node, epoch=self.epoch, link=self.link, now=clock.now
        )
        vault = Vault(node=settings.node, link=self.link, clock=clock)
        self.supervisor = Supervisor(
            told(drivers(settings), self.violations, vault), journal=self.journal,
            observer=self.observer, locator=locator(settings.store_url, layers), clock=clock,
            bounds=Bounds(
                limits=limits, start_concurrency=settings.start_concurrency,
                stop_timeout_s=settings.stop_timeout_s,
                recover_timeout_s=settings.recover_timeout_s,
                verifying_max_s=settings.verifying_max_s,
            ),
            measured=lambda: self.meter.last, routed=self.routes.serve, told=self._told,
            routes=self.routes.known,
        )  # fmt: skip
        self.door = Door(
            self.supervisor, node=settings.node, link=self.link, execs=self.execs,
            trail=self.trail, observer=self.observer, clock=clock,
            ops_per_sandbox=settings.ops_per_sandbox, ops_per_node=settings.ops_per_node,
            connections_per_sandbox=settings.connections_per_sandbox,
        )  # fmt: skip
        self.presence = Presence(
            self.supervisor, settings=settings, epoch=self.epoch, limits=limits,
            meter=self.meter,
        )  # fmt: skip
        self.excess = Excess(self.supervisor, node=settings.node, link=self.link, clock=clock)
        self.health = self._health()

    def _health(self) -> Health:
        health = Health("edge")
        health.add("journal", self.journal.check)
        health.add("bus", self.link.check)
        health.add("join", self.presence.check)
        for name in COUNTED:
            health.count(f"operations_{name}", partial(self.door.counts.__getitem__, name))
        for name in trail.COUNTED:
            health.count(f"records_{name}", partial(self.trail.counts.__getitem__, name))
        return health

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop``."""
        await self.supervisor.open()
        self.trail.start()
        self.outputs.start()
        if self.settings.health_port:
            await self.health.serve(self.settings.health_port)
        stopping = asyncio.ensure_future(stop.wait())
        watching = asyncio.gather(self._watched(), self.excess.run(), self.violations.run())
        try:
            while not stop.is_set():
                connected = asyncio.ensure_future(self._connected())
                await asyncio.wait({connected, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if stop.is_set():
                    await self.door.close()
                connected.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await connected
        finally:
            stopping.cancel()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self.routes.close()
            await self.trail.close()
            await self.outputs.close()
            await self.supervisor.close()
            self.execs.close()
            await self.health.close()
            self._lock.close()

    async def _told(self, uid: str) -> None:
        """Of a sandbox that has ended."""
        await self.trail.settle(uid, self.door.logging(uid))

    async def _watched(self) -> None:
        if is_remote(self.settings.store_url):
            await self.watch.run()

    async def _connected(self) -> None:
        """One connection, from its making to its end for good."""
        prefix = inbox_prefix(self.settings.principal, self.epoch)
        bus = Bus(self.settings, f"edge-{self.settings.node}", inbox_prefix=prefix)
        tasks: list[asyncio.Task[None]] = []
        consumer = BatchConsumer(
            bus, EDGE_DURABLE, Commands(self.supervisor), node=self.settings.node
        )
        try:
            await bus.start()
            self.link.set(bus)
            await self.door.open(bus)
            consumer.start()
            tasks.append(asyncio.create_task(self.presence.run(bus, consumer)))
            await bus.closed.wait()
            log.warning("the bus ended the connection: a new one is made")
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("no connection to the bus")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await consumer.close()
            await self._close(bus)
        await asyncio.sleep(RECONNECT_S)

    async def _close(self, bus: Bus) -> None:
        await self.observer.flush()
        await self.trail.flush()
        self.link.set(None)
        try:
            await bus.close()
        except Exception as exc:  # it may be closed already
            log.debug("closing the bus: %r", exc)


def told(made: dict[str, Driver], teller: Teller, vault: Vault) -> dict[str, Driver]:
    """The drivers, those that deny things telling ``teller`` and asking ``vault``."""
    for driver in made.values():
        if (enforcing := offered(driver, Enforcing)) is not None:
            enforcing.report_to(teller.tell)
            enforcing.secrets_from(vault)
    return made


def drivers(settings: Settings) -> dict[str, Driver]:
    """The node's drivers, not opened."""
    made: dict[str, Driver] = {}
    for name in settings.driver_names:
        folder = settings.state_path / "drivers" / name
        folder.mkdir(parents=True, exist_ok=True)
        config = registry.DriverConfig(settings.node, folder, registry.options(name, os.environ))
        made[name] = registry.create(name, config)
    return made


def lock(settings: Settings) -> IO[str]:
    """One edge a state folder: two would each take the other's sandboxes for leftovers."""
    file = (settings.state_path / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        file.close()
        raise Conflict(f"another edge runs on {settings.state_dir}", field="state_dir") from exc
    return file


def _base36(number: int) -> str:
    text = ""
    while number:
        number, digit = divmod(number, 36)
        text = _DIGITS[digit] + text
    return text or "0"


async def main(settings: Settings, stop: asyncio.Event) -> None:
    """Runs the edge."""
    await Edge(settings).run(stop)
