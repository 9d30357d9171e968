"""Properties of the burst planner: threshold, hysteresis, portion, bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.burst import PoolLoad
from schemas.node import Heartbeat, Resources
from services.burst.planner import Plan, Rule, plan, pool_loads, portion, wanted_nodes

RULE = Rule(max_nodes=50, node=Resources(cores=10, memory_mb=10_000, sandboxes=100))


def beat(node: str, used: float, *, pool: Any = "onprem", size: float = 100.0) -> Heartbeat:
    """A node of ``size`` cores with the share ``used`` of everything committed."""

    def amounts(share: float) -> Resources:
        return Resources(
            cores=size * share, memory_mb=int(size * 1000 * share), sandboxes=int(size * 10 * share)
        )

    return Heartbeat(
        node=node, epoch="e", seq=1, at=0.0, pool=pool, capacity=amounts(1.0),
        committed=amounts(used), used=amounts(used / 2),
    )  # fmt: skip


def loads(onprem: float, cloud: float | None = None, cloud_nodes: int = 1) -> dict[str, PoolLoad]:
    beats = [beat("a", onprem)]
    if cloud is not None:
        beats += [beat(f"c{i}", cloud, pool="cloud", size=10) for i in range(cloud_nodes)]
    return pool_loads(beats)


def decide(pools: dict[str, PoolLoad], *, bursting: bool = False, pending: int = 0,
           empty: int = 0, rule: Rule = RULE) -> Plan:  # fmt: skip
    return plan(pools, rule, bursting=bursting, pending=pending, empty=empty)


shares = st.floats(0, 1.2, allow_nan=False)


@given(shares, st.none() | shares, st.integers(1, 60), st.booleans(), st.integers(0, 60),
       st.integers(0, 60))  # fmt: skip
def test_a_plan_keeps_its_bounds(onprem, cloud, nodes, bursting, pending, empty) -> None:
    pools = loads(onprem, cloud, nodes)
    made = decide(pools, bursting=bursting, pending=pending, empty=empty)
    present = pools["cloud"].nodes if "cloud" in pools else 0
    assert 0 <= made.share <= 1
    assert made.lease >= 0
    assert made.release >= 0
    assert not (made.lease and made.release)
    assert made.release <= min(empty, present)
    if made.lease:
        assert present + pending + made.lease <= RULE.max_nodes
    if not made.bursting:
        assert made.share == 0
        assert made.lease == 0
    if cloud is None or cloud >= 1:
        assert made.share == 0
    assert made.reason


@given(shares)
def test_bursting_begins_above_the_threshold_and_ends_below_the_floor(onprem: float) -> None:
    pools = loads(onprem, 0.5)
    load = pools["onprem"].utilisation
    assert decide(pools).bursting == (load > RULE.threshold)
    assert decide(pools, bursting=True).bursting == (load >= RULE.floor)


@given(st.lists(st.floats(0.71, 0.79), min_size=1, max_size=30), st.booleans())
def test_between_floor_and_threshold_nothing_swings(series: list[float], bursting: bool) -> None:
    for load in series:
        assert decide(loads(load, 0.2), bursting=bursting).bursting == bursting


@given(shares, shares)
def test_the_portion_rises_with_the_load(one: float, other: float) -> None:
    low, high = sorted((one, other))
    cloud = loads(0, 0.5)["cloud"]
    assert portion(low, cloud, RULE) <= portion(high, cloud, RULE)


def test_the_portion_has_no_step_at_its_end() -> None:
    cloud = loads(0, 0.5)["cloud"]
    assert portion(RULE.floor, cloud, RULE) == 0
    assert portion(1.0, cloud, RULE) == RULE.max_share
    halved = dataclasses.replace(RULE, max_share=0.5)
    assert portion(1.0, cloud, halved) == 0.5


@given(st.floats(0.8, 1.0), st.floats(0, 1.0), st.integers(1, 40))
def test_leased_nodes_carry_the_demand_over_the_threshold(onprem, cloud, nodes) -> None:
    pools = loads(onprem, cloud, nodes)
    wanted = wanted_nodes(pools["onprem"], pools["cloud"], RULE)
    demand = pools["onprem"].committed.cores + pools["cloud"].committed.cores
    room = RULE.threshold * (pools["onprem"].capacity.cores + wanted * RULE.node.cores)
    assert wanted == RULE.max_nodes or room >= demand - 1e-6
    fewer = RULE.threshold * (pools["onprem"].capacity.cores + (wanted - 2) * RULE.node.cores)
    assert wanted < 2 or fewer < demand, "no more nodes than needed"


def test_pending_leases_are_not_asked_for_again() -> None:
    first = decide(loads(1.0))
    assert first.lease > 0
    assert decide(loads(1.0), bursting=True, pending=first.lease).lease == 0


def test_silence_leases_nothing() -> None:
    assert decide({}, bursting=True) == Plan(False, 0.0, 0.0, 0, 0, "no on-prem node is heard")


def test_the_scarcest_dimension_decides_by_promise_or_by_measure() -> None:
    capacity = Resources(cores=10, memory_mb=1000, sandboxes=100)
    node = Heartbeat(
        node="a", epoch="e", seq=1, at=0.0, capacity=capacity,
        committed=Resources(cores=1, memory_mb=200, sandboxes=10),
        used=Resources(cores=9, memory_mb=100, sandboxes=0),
    )  # fmt: skip
    assert pool_loads([node])["onprem"].utilisation == 0.9


@given(shares, shares)
def test_a_plan_is_told_again_only_when_it_matters(one: float, other: float) -> None:
    first, second = decide(loads(one)), decide(loads(other))
    assert not first.differs(first)
    assert first.differs(None)
    assert first.differs(second) == second.differs(first)
    if abs(first.utilisation - second.utilisation) >= 0.06:
        assert first.differs(second)


@pytest.mark.parametrize(
    "fields",
    [{"floor": 0.9}, {"threshold": 1.0}, {"floor": 0.0}, {"max_share": 1.5}, {"max_nodes": -1},
     {"node": Resources()}],
)  # fmt: skip
def test_a_rule_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        dataclasses.replace(RULE, **fields)
