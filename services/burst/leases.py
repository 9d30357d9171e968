"""Carries out a plan's numbers at a provider, one recorded step at a time.

A lease is recorded before it is ordered and its id is the provider's idempotency
key: after a crash in between the order is repeated, not doubled.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from services.burst.planner import Plan
from services.burst.providers import Provider
from services.burst.store import Lease, Store
from shared import ids
from shared.errors import DsecError, Unavailable

log = logging.getLogger(__name__)

MAX_STEPS = 20
"""Orders a round: a provider's API is not to be flooded."""


class Leases:
    """The leases of one provider."""

    def __init__(self, store: Store, provider: Provider, *, max_nodes: int) -> None:
        self._store = store
        self._provider = provider
        self._max_nodes = max_nodes

    async def settle(self, present: Collection[str]) -> int:
        """Notes which nodes have joined; returns how many are still awaited."""
        pending = 0
        for lease in await self._store.leases():
            if lease.state == "requested" and lease.node in present:
                await self._store.move_lease(lease.lease_id, "joined", source="requested")
            elif lease.state == "requested":
                pending += 1
        return pending

    async def carry_out(self, plan: Plan, empty: Collection[str]) -> None:
        """Orders and gives back; finishes what an earlier round began."""
        if not self._provider.supported:
            return
        if plan.lease:
            fresh = [ids.new() for _ in range(min(plan.lease, MAX_STEPS))]
            await self._store.add_leases(fresh, self._provider.name, max_open=self._max_nodes)
        leases = await self._store.leases()
        for lease in [x for x in leases if x.state == "requested" and x.node is None][:MAX_STEPS]:
            await self._order(lease)
        idle = [x for x in leases if x.state == "joined" and x.node in empty][: plan.release]
        for lease in idle:
            await self._store.move_lease(lease.lease_id, "releasing", source="joined")
        for lease in [*idle, *(x for x in leases if x.state == "releasing")][:MAX_STEPS]:
            await self._end(lease)

    async def _order(self, lease: Lease) -> None:
        try:
            node = await self._provider.lease(lease.lease_id)
        except Unavailable as exc:
            log.warning("lease %s is asked for again: %s", lease.lease_id, exc.message)
        except DsecError as exc:
            log.error("lease %s failed: %s", lease.lease_id, exc.message)
            await self._store.move_lease(
                lease.lease_id, "failed", source="requested", reason=exc.message
            )
        else:
            await self._store.move_lease(lease.lease_id, "requested", source="requested", node=node)

    async def _end(self, lease: Lease) -> None:
        try:
            await self._provider.release(lease.node or "")
        except DsecError as exc:
            log.warning("node %s is given back later: %s", lease.node, exc.message)
            return
        await self._store.move_lease(lease.lease_id, "released", source="releasing")
