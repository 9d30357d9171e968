"""Questions that other services and edges ask: join, sandboxes, nodes.

Owns: the answers. Does not own: SQL, or who may ask (auth for clients, the bus's
permissions for edges).
"""

from __future__ import annotations

from schemas.base import decode
from schemas.hotset import EnvironmentCount, EnvironmentCounts, EnvironmentsQuery
from schemas.iam import IamQuery
from schemas.image import LayerUse, LayerUseQuery, Origin, OriginQuery
from schemas.node import JoinReply, JoinRequest, NodeInfo, NodeList, Resources
from schemas.sandbox import Ended, EndedQuery, ResolvedSpec, SandboxPage, SandboxQuery
from schemas.streams import EDGE_DURABLE
from services.scheduler import nodes, reads, requests, store
from services.scheduler.fleet import Fleet
from services.scheduler.settings import Settings
from shared import topology
from shared.bus import Bus, Incoming
from shared.db import Database
from shared.errors import Forbidden, NotFound, SandboxDied, Unavailable


class Questions:
    """Answers on ``dsec.rpc.v1.scheduler.*``."""

    def __init__(self, settings: Settings, bus: Bus, db: Database, fleet: Fleet) -> None:
        self._settings = settings
        self._bus = bus
        self._db = db
        self._fleet = fleet

    async def join(self, request: JoinRequest, incoming: Incoming) -> JoinReply:
        """An edge starts: its queue exists, its node is known, and it hears which of
        its sandboxes are over. Those it should have and has not get a deadline."""
        if incoming.subject.rpartition(".")[2] != request.node:
            raise Forbidden(f"{incoming.subject} cannot join as {request.node}", field="node")
        durable = await topology.declare_durable(self._bus.js, EDGE_DURABLE, request.node)
        async with self._db.transaction() as connection:
            await nodes.seen(connection, [request])
            forget = await reads.over(connection, request.node, request.live)
            await reads.flag_missing(
                connection, request.node, request.live, after_s=self._settings.missing_s
            )
        await self._fleet.refresh()
        return JoinReply(node=request.node, durable=durable, forget=forget)

    async def sandboxes(self, query: SandboxQuery, _: Incoming) -> SandboxPage:
        """One page. With one sandbox asked for, its spec comes along."""
        async with self._db.transaction() as connection:
            rows = await reads.page(connection, query, query.limit + 1)
            more = len(rows) > query.limit
            rows = rows[: query.limit]
            keys = {(r.request_id or "", r.spec_idx) for r in rows}
            found = await requests.specs(connection, keys)
        specs = {k: decode(body, ResolvedSpec).spec for k, (body, _, _) in found.items()}
        return SandboxPage(
            sandboxes=[reads.info(r, specs.get((r.request_id or "", r.spec_idx))) for r in rows],
            next=rows[-1].uid if more else None,
        )

    async def origin(self, query: OriginQuery, _: Incoming) -> Origin:
        """A living sandbox with what it was started from. Raises ``NotFound``,
        ``SandboxDied`` or ``Unavailable`` (it has no node yet)."""
        async with self._db.transaction() as connection:
            rows = await store.find(connection, [query.uid])
            if not rows or rows[0].project != query.project or rows[0].request_id is None:
                raise NotFound(f"no sandbox {query.uid} in {query.project}", field="uid")
            row = rows[0]
            key = (row.request_id or "", row.spec_idx)
            found = await requests.specs(connection, [key])
        if row.terminal:
            raise SandboxDied(f"sandbox {row.uid} is {row.state}", cause=row.cause)
        if row.node is None or key not in found:
            raise Unavailable(f"sandbox {row.uid} is {row.state}", retry_after_s=0.5)
        return Origin(
            uid=row.uid, node=row.node, state=row.state,  # type: ignore[arg-type]
            resolved=decode(found[key][0], ResolvedSpec), job=row.job,
        )  # fmt: skip

    async def layers(self, query: LayerUseQuery, _: Incoming) -> LayerUse:
        """Which layers must not be removed."""
        async with self._db.transaction() as connection:
            used = await reads.used_layers(
                connection, query.digests, lost_s=self._settings.lost_layers_s
            )
        return LayerUse(used=used)

    async def ended(self, query: EndedQuery, _: Incoming) -> Ended:
        """What is over; auth may not have heard of it yet."""
        async with self._db.transaction() as connection:
            return Ended(
                sandboxes=await reads.ended(connection, since_s=query.since_s, limit=query.limit)
            )

    async def environments(self, query: EnvironmentsQuery, _: Incoming) -> EnvironmentCounts:
        """What was started how often."""
        async with self._db.transaction() as connection:
            rows = await reads.environments(connection, since_s=query.since_s, limit=query.limit)
        return EnvironmentCounts(
            environments=[EnvironmentCount(digests=d, sandboxes=n) for d, n in rows]
        )

    async def nodes(self, _query: IamQuery, _: Incoming) -> NodeList:
        """The fleet: rows from the database, use from the load view."""
        async with self._db.transaction() as connection:
            rows = await nodes.every(connection)
        load = self._fleet.load()
        out = []
        for row in rows:
            beat = load.get(row.id)
            out.append(
                NodeInfo(
                    id=row.id, state=row.state, pool=row.pool,  # type: ignore[arg-type]
                    capacity=row.capacity, committed=row.committed,
                    used=beat.used if beat else Resources(), backends=row.backends,
                    counts=beat.counts if beat else {}, seen_at=row.seen_at, epoch=row.epoch,
                )
            )  # fmt: skip
        return NodeList(nodes=out)
