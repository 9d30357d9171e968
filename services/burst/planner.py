"""When to burst, how much of it, how many nodes. Pure.

Owns: utilisation of a pool, the threshold with hysteresis, the portion of creations
for the cloud, numbers of nodes to lease and to give back. Does not own: which
creation is eligible (placement) or any provider.

The rule: bursting begins above ``threshold`` and ends below ``floor``. While it goes
on, the portion rises from 0 at the floor to ``max_share`` at a full on-prem pool: it
has no step at its end, so it does not swing around it. Leased capacity follows the
demand over ``threshold`` of the on-prem pool, wherever that demand runs now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.burst import PoolLoad
from schemas.node import Heartbeat, Resources

ONPREM, CLOUD = "onprem", "cloud"
SHARE_DIGITS = 2
"""Portions are rounded: a plan changes when it matters."""
SMALLEST_MOVE = 0.05
"""A change of utilisation worth telling on its own."""


@dataclass(frozen=True)
class Rule:
    """Thresholds are utilisations; ``node`` is what one cloud node brings."""

    threshold: float = 0.8
    floor: float = 0.7
    max_share: float = 1.0
    max_nodes: int = 200
    node: Resources = Resources(cores=64.0, memory_mb=262_144, sandboxes=1_000)

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.threshold < 1:
            raise ValueError("0 < burst_floor <= burst_threshold < 1 must hold")
        if not 0 <= self.max_share <= 1 or self.max_nodes < 0:
            raise ValueError("0 <= burst_max_share <= 1 and burst_max_nodes >= 0 must hold")
        if min(self.node.cores, self.node.memory_mb, self.node.sandboxes) <= 0:
            raise ValueError("a cloud node must bring cores, memory and sandboxes")


@dataclass(frozen=True)
class Plan:
    """What should be. At most one of ``lease`` and ``release`` is above 0."""

    bursting: bool
    utilisation: float
    share: float
    lease: int
    release: int
    reason: str

    def differs(self, other: Plan | None) -> bool:
        """Whether this plan is worth telling after ``other``."""
        if other is None:
            return True
        mine = (self.bursting, self.share, self.lease, self.release)
        if mine != (other.bursting, other.share, other.lease, other.release):
            return True
        return abs(self.utilisation - other.utilisation) >= SMALLEST_MOVE


def _sum(amounts: Iterable[Resources]) -> Resources:
    items = list(amounts)
    return Resources(
        cores=sum(a.cores for a in items),
        memory_mb=sum(a.memory_mb for a in items),
        sandboxes=sum(a.sandboxes for a in items),
    )


def _shares(part: Resources, whole: Resources) -> list[float]:
    """``part / whole`` in each dimension that ``whole`` has any of."""
    pairs = (
        (part.cores, whole.cores),
        (part.memory_mb, whole.memory_mb),
        (part.sandboxes, whole.sandboxes),
    )
    return [a / b for a, b in pairs if b > 0]


def utilisation(capacity: Resources, committed: Resources, used: Resources) -> float:
    """The scarcest dimension decides, by what is promised or by what is measured,
    whichever is more. 0 for a pool without capacity."""
    return max([0.0, *_shares(committed, capacity), *_shares(used, capacity)])


def pool_loads(beats: Iterable[Heartbeat]) -> dict[str, PoolLoad]:
    """The load of each pool that has a node."""
    by_pool: dict[str, list[Heartbeat]] = {}
    for beat in beats:
        by_pool.setdefault(beat.pool, []).append(beat)
    loads = {}
    for pool, members in by_pool.items():
        capacity = _sum(b.capacity for b in members)
        committed = _sum(b.committed for b in members)
        used = _sum(b.used for b in members)
        loads[pool] = PoolLoad(
            nodes=len(members), capacity=capacity, committed=committed, used=used,
            utilisation=round(utilisation(capacity, committed, used), 4),
        )  # fmt: skip
    return loads


def wanted_nodes(onprem: PoolLoad, cloud: PoolLoad | None, rule: Rule) -> int:
    """Cloud nodes that carry the demand over the threshold, each filled to the
    threshold itself; at most ``rule.max_nodes``."""
    demand = _sum([onprem.committed, *([cloud.committed] if cloud else [])])
    room = onprem.capacity
    over = Resources(
        cores=max(0.0, demand.cores - rule.threshold * room.cores),
        memory_mb=max(0, math.ceil(demand.memory_mb - rule.threshold * room.memory_mb)),
        sandboxes=max(0, math.ceil(demand.sandboxes - rule.threshold * room.sandboxes)),
    )
    nodes = math.ceil(max(_shares(over, rule.node)) / rule.threshold)
    return min(rule.max_nodes, nodes)


def portion(load: float, cloud: PoolLoad | None, rule: Rule) -> float:
    """The share of eligible creations for the cloud; 0 where it has no room."""
    if cloud is None or cloud.nodes == 0 or cloud.utilisation >= 1:
        return 0.0
    rising = (load - rule.floor) / (1 - rule.floor)
    return round(min(1.0, max(0.0, rising)) * rule.max_share, SHARE_DIGITS)


def plan(
    pools: dict[str, PoolLoad], rule: Rule, *, bursting: bool, pending: int, empty: int
) -> Plan:
    """The plan for now. ``bursting``: whether the plan before was; ``pending``: leases
    asked for whose node has not joined; ``empty``: cloud nodes without a sandbox."""
    onprem, cloud = pools.get(ONPREM), pools.get(CLOUD)
    if onprem is None or not onprem.nodes:  # silence is no demand: it must not cost money
        return Plan(False, 0.0, 0.0, 0, 0, "no on-prem node is heard")
    load = onprem.utilisation
    active = load > rule.threshold or (bursting and load >= rule.floor)
    present = cloud.nodes if cloud else 0
    if not active:
        give_back = min(empty, present)
        reason = f"{load:.0%} is below {rule.floor if bursting else rule.threshold:.0%}"
        return Plan(False, load, 0.0, 0, give_back, reason)
    lease = max(0, wanted_nodes(onprem, cloud, rule) - present - pending)
    share = portion(load, cloud, rule)
    return Plan(True, load, share, lease, 0, f"{load:.0%} of the on-prem pool is taken")
