"""What burst does: listens to heartbeats, plans every second, tells what changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from schemas.burst import BurstPlan, PoolLoad
from schemas.node import Heartbeat
from schemas.subjects import evt
from services.burst import planner
from services.burst.fleet import Fleet
from services.burst.leases import Leases
from services.burst.planner import Plan, Rule
from services.burst.providers import Provider
from services.burst.store import Store
from shared.bus import Incoming
from shared.clock import Clock
from shared.errors import Unavailable

log = logging.getLogger(__name__)

STOOD = 0.5
"""Later than so much of what silence takes, a round finds that this process stood still:
what nodes said meanwhile is not read yet."""
PLAN_SUBJECT = evt("burst", "plan", planner.ONPREM)


class Handlers:
    """One round is: loads, plan, tell, carry out. ``connected`` says whether the bus is there.
    A plan that sends creations to the cloud stands until this process has listened for as long
    as silence takes: after an outage of the bus, or of this process, everyone was silent."""

    def __init__(
        self, store: Store, provider: Provider, rule: Rule, clock: Clock, *,
        silent_s: float, repeat_s: float, connected: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._store = store
        self._provider = provider
        self._leases = Leases(store, provider, max_nodes=rule.max_nodes)
        self._rule = rule
        self._clock = clock
        self._repeat_s = repeat_s
        self._fleet = Fleet(silent_s)
        self._silent_s = silent_s
        self._connected = connected
        self._listening_since = self._round_at = clock.monotonic()
        self._told: Plan | None = None
        self._told_at = 0.0
        self._rounds_end = time.monotonic()

    async def heartbeat(self, beat: Heartbeat, incoming: Incoming) -> None:
        """``dsec.hb.v1.<node>``. A beat under another's name is not believed."""
        if incoming.subject.rpartition(".")[2] == beat.node:
            self._fleet.heard(beat, self._clock.monotonic())

    async def round(self) -> Plan:
        """Plans once. Raises ``Unavailable`` without the database."""
        now = self._clock.monotonic()
        listened = self._has_listened(now)
        if self._told is None:  # hysteresis goes on over a restart
            self._told = await self._store.last_plan()
        if self._told and self._told.bursting and not listened:
            self._rounds_end = time.monotonic()
            return self._told
        beats = self._fleet.present(now)
        cloud = [b for b in beats if b.pool == planner.CLOUD]
        empty = {b.node for b in cloud if not b.committed.sandboxes}
        pending = await self._leases.settle({b.node for b in cloud}) if self._supported else 0
        pools = planner.pool_loads(beats)
        bursting = self._told.bursting if self._told else False
        plan = planner.plan(pools, self._rule, bursting=bursting, pending=pending, empty=len(empty))
        if plan.differs(self._told) or now - self._told_at >= self._repeat_s:
            await self._tell(plan, pools)
            self._told, self._told_at = plan, now
        await self._leases.carry_out(plan, empty)
        self._rounds_end = time.monotonic()
        return plan

    def _has_listened(self, now: float) -> bool:
        late_s, self._round_at = now - self._round_at, now
        if late_s > self._silent_s * STOOD or not self._connected():
            self._listening_since = now
        return now - self._listening_since >= self._silent_s

    @property
    def _supported(self) -> bool:
        return self._provider.supported

    async def _tell(self, plan: Plan, pools: dict[str, PoolLoad]) -> None:
        reason = plan.reason
        if plan.lease and not self._supported:
            reason += f"; nothing is leased: {self._provider.reason}"
        message = BurstPlan(
            at=self._clock.now(), utilisation=plan.utilisation, threshold=self._rule.threshold,
            share=plan.share, lease=plan.lease, release=plan.release, reason=reason, pools=pools,
        )  # fmt: skip
        if await self._store.tell(plan, message, PLAN_SUBJECT, repeat_s=self._repeat_s):
            log.info(
                "plan: %s; share %.0f %%, lease %d, release %d",
                reason, plan.share * 100, plan.lease, plan.release,
            )  # fmt: skip

    async def check(self) -> None:
        """A health check: raises ``Unavailable`` where no round ended of late."""
        if time.monotonic() - self._rounds_end > 30:
            raise Unavailable("no round ended in 30 s")
