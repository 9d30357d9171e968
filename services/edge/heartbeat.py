"""How the others know of this node: the join and a heartbeat every second.

Owns: when they are sent. Does not own: what a node has (probe) or holds (supervisor).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from schemas.base import encode
from schemas.node import BackendStatus, Heartbeat, JoinReply, JoinRequest, Resources
from schemas.subjects import hb, join
from services.edge.admission import Amount, Limits, admit
from services.edge.machine.probe import Meter, status
from services.edge.settings import Settings
from services.edge.supervisor import Supervisor
from shared.bus import Bus, Outgoing
from shared.consumer import BatchConsumer
from shared.errors import DsecError, Unavailable

log = logging.getLogger(__name__)

BEAT_S = 1.0
JOIN_S = 3.0
"""Wait for the answer to a join; asked again until there is one."""
JOIN_RETRY_S = 1.0
PROBE_EVERY = 60
VERSION = "0.1.0"


class Presence:
    """Joins and beats on one connection."""

    def __init__(
        self, supervisor: Supervisor, *, settings: Settings, epoch: str, limits: Limits,
        meter: Meter,
    ) -> None:  # fmt: skip
        self._supervisor = supervisor
        self._settings = settings
        self._epoch = epoch
        self._limits = limits
        self._meter = meter
        self._seq = 0
        self.joined = False

    async def run(self, bus: Bus, consumer: BatchConsumer) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beats(bus))
            group.create_task(self._joins(bus, consumer))
            group.create_task(self._probes())

    async def check(self) -> None:
        """A health check."""
        if not self.joined:
            raise Unavailable("the scheduler has not answered the join")

    async def _beats(self, bus: Bus) -> None:
        while True:
            try:
                await bus.send(Outgoing(hb(self._settings.node), encode(self.beat())))
            except DsecError as exc:
                log.debug("no heartbeat: %s", exc.message)
            except Exception:
                log.exception("no heartbeat")
            await asyncio.sleep(BEAT_S)

    def beat(self) -> Heartbeat:
        """The node now."""
        measured = self._meter.measure()
        self._seq += 1
        committed = self._supervisor.committed
        # not by what is committed: the scheduler counts that exactly, and a beat that
        # is a second old must not keep room closed that was given back since
        refusal = admit(Amount(), committed=Amount(), limits=self._limits, measured=measured)
        return Heartbeat(
            node=self._settings.node, epoch=self._epoch, seq=self._seq, at=time.time(),
            capacity=resources(self._limits.capacity), committed=resources(committed),
            used=Resources(
                cores=measured.cores_used, memory_mb=measured.memory_used_mb,
                sandboxes=len(self._supervisor.sandboxes),
            ),
            pool=self._settings.pool, backends=self._backends(),  # type: ignore[arg-type]
            counts=self._supervisor.counts(), pressure=dict(measured.pressure),
            admitting=refusal is None, refusing=refusal.details["limit"] if refusal else "",
            version=VERSION,
        )  # fmt: skip

    def _backends(self) -> dict[str, BackendStatus]:
        return {name: status(report) for name, report in self._supervisor.reports.items()}

    async def _joins(self, bus: Bus, consumer: BatchConsumer) -> None:
        """Joins at the start, after every reconnect (the bus may have lost the node's
        queue) and when the queue falls silent."""
        reconnects = _Changed(lambda: bus.reconnects)
        while True:
            self.joined = False
            try:
                await self._join(bus)
            except DsecError as exc:
                log.info("join: %s", exc.message)
                await asyncio.sleep(JOIN_RETRY_S)
                continue
            except Exception:
                log.exception("join")
                await asyncio.sleep(JOIN_RETRY_S)
                continue
            self.joined = True
            while not reconnects():
                await asyncio.sleep(BEAT_S)
                if bus.client.is_connected and await _silent(consumer):
                    break

    async def _join(self, bus: Bus) -> None:
        request = JoinRequest(
            node=self._settings.node, epoch=self._epoch, pool=self._settings.pool,  # type: ignore[arg-type]
            backends=self._backends(), capacity=resources(self._limits.capacity),
            live=list(self._supervisor.sandboxes),
        )  # fmt: skip
        subject = join(self._settings.node)
        reply = await bus.request(subject, request, JoinReply, timeout_s=JOIN_S)
        log.info("joined as %s, %d to forget", reply.node, len(reply.forget))
        self._supervisor.forget(reply.forget)

    async def _probes(self) -> None:
        while True:
            await asyncio.sleep(PROBE_EVERY)
            try:
                await self._supervisor.probe()
            except Exception:
                log.exception("probe")


def resources(amount: Amount) -> Resources:
    """The wire form of an amount."""
    return Resources(
        cores=round(amount.cores, 3), memory_mb=amount.memory_mb, sandboxes=amount.sandboxes
    )


class _Changed:
    """Whether a number changed since it was last asked for."""

    def __init__(self, read: Callable[[], int]) -> None:
        self._read = read
        self._last = read()

    def __call__(self) -> bool:
        last, self._last = self._last, self._read()
        return last != self._last


async def _silent(consumer: BatchConsumer) -> bool:
    try:
        await consumer.check()
    except Unavailable:
        return True
    return False
