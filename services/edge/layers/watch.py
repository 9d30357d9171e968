"""Tells audit what went wrong with layers of a remote store, and imagesvc what was read.

Owns: asking the layer service, the way onto the bus. Does not own: what is a fault. A fault
has one id, so that one told twice, as after the edge's restart, is recorded once.
"""

from __future__ import annotations

import asyncio
import logging

from schemas.audit import Violation, Violations
from schemas.base import encode
from schemas.hotset import LayerAccess, LayerAccesses
from schemas.subjects import evt, sec
from services.edge.layers.client import LayerService
from services.edge.layers.control import Trace
from services.edge.layers.faults import Fault
from services.edge.link import Link
from shared.bus import Outgoing
from shared.errors import DsecError

log = logging.getLogger(__name__)

LOOK_S = 1.0


class Watch:
    """Runs beside the edge."""

    def __init__(self, service: LayerService, *, node: str, link: Link) -> None:
        self._service, self._node, self._link = service, node, link
        self._told = self._traced = 0

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._tell(await asyncio.to_thread(self._service.faults, self._told))
                await self._trace(await asyncio.to_thread(self._service.traces, self._traced))
            except DsecError as error:
                log.debug("what happened to layers is told later: %s", error.message)
            except Exception:
                log.exception("what happened to layers")

    async def _trace(self, traces: list[Trace]) -> None:
        if not traces:
            return
        message = LayerAccesses(
            node=self._node,
            layers=[
                LayerAccess(digest=one.digest, unit_bytes=one.unit_bytes, units=one.units)
                for one in traces
            ],
        )
        number = traces[-1].number
        subject = evt("edge", "access_profile", self._node)
        await self._link.bus.store(
            [Outgoing(subject, encode(message), msg_id=f"{self._node}-traces-{number}")]
        )
        self._traced = number

    async def _tell(self, faults: list[Fault]) -> None:
        if not faults:
            return
        message = Violations(
            node=self._node, violations=[violation(self._node, fault) for fault in faults]
        )
        subject = sec("layers", "observed", self._node)
        number = faults[-1].number
        await self._link.bus.store(
            [Outgoing(subject, encode(message), msg_id=f"{self._node}-layers-{number}")]
        )
        self._told = number


def violation(node: str, fault: Fault) -> Violation:
    """A fault as audit records it: it is the node's, whatever sandbox met it."""
    return Violation(
        id=f"layers-{fault.number}", at=fault.at, node=node, uid="", project="",
        source="layers", verdict="observed", rule=f"layer_{fault.kind}",
        mechanism="sha256" if fault.kind == "damaged" else "store",
        actor={"chunk": fault.chunk, "message": fault.message}, subject=fault.digest,
        count=fault.count,
    )  # fmt: skip
