"""Placement: eligibility, spread, typed reasons, the overlay."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.node import BackendStatus, FeatureReport, Resources
from schemas.sandbox import SandboxSpec
from services.scheduler.placement import (
    Ask,
    Need,
    NodeView,
    Overlay,
    amounts,
    need_of,
    place_batch,
    why_not,
)

FAKE = BackendStatus(supported=True, features={"disk_limit": FeatureReport(supported=True)})
ROOM = Resources(cores=1000.0, memory_mb=1_000_000, sandboxes=1000)


def node(name: str, *, room: Resources = ROOM, backend: BackendStatus = FAKE, **kw) -> NodeView:
    return NodeView(name, kw.pop("pool", "onprem"), room, {"fake": backend}, **kw)


def asks(count: int, need: Need | None = None, cores: float = 1.0, memory_mb: int = 100):
    return [Ask(f"u{i}", need or Need("fake"), cores, memory_mb) for i in range(count)]


def test_a_burst_on_stale_nodes_is_spread() -> None:
    """(B10)"""
    choices = 2
    for seed in range(50):
        nodes = [node(f"n{i}") for i in range(5)]
        placed = place_batch(asks(200), nodes, random.Random(seed), choices=choices)
        counts = Counter(placed.nodes.values())
        assert len(placed.nodes) == 200
        assert max(counts.values()) - min(counts.values()) <= 200 / 5 * 0.1 + choices


def test_a_loaded_node_gets_less() -> None:
    nodes = [node("idle"), node("busy", pressure=0.9)]
    placed = place_batch(asks(100), nodes, random.Random(1))
    assert Counter(placed.nodes.values())["idle"] > 60


def test_exactly_what_fits_is_placed() -> None:
    """(B11)"""
    small = Resources(cores=100.0, memory_mb=10_000, sandboxes=10)
    nodes = [node("a", room=small), node("b", room=small)]
    placed = place_batch(asks(100), nodes, random.Random(0), retry_after_s=7.0)
    assert Counter(placed.nodes.values()) == {"a": 10, "b": 10}
    assert len(placed.failed) == 80
    for failure in placed.failed.values():
        error = failure.error
        assert failure.hope
        assert (error.code, error.retryable, error.is_infra) == ("capacity_exhausted", True, True)
        assert error.retry_after_s == 7.0


@settings(max_examples=100, deadline=None)
@given(
    rooms=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2000)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 500), max_size=60),
    seed=st.integers(0, 1000),
)
def test_no_node_is_overcommitted_and_nothing_is_lost(rooms, sizes, seed) -> None:
    nodes = [
        node(f"n{i}", room=Resources(cores=100.0, memory_mb=m, sandboxes=n))
        for i, (n, m) in enumerate(rooms)
    ]
    wanted = [Ask(f"u{i}", Need("fake"), 1.0, m) for i, m in enumerate(sizes)]
    placed = place_batch(wanted, nodes, random.Random(seed))
    assert placed.nodes.keys() | placed.failed.keys() == {a.uid for a in wanted}
    assert not placed.nodes.keys() & placed.failed.keys()
    for view in nodes:
        mine = [a for a in wanted if placed.nodes.get(a.uid) == view.id]
        assert view.sandboxes == len(mine) <= view.capacity.sandboxes
        assert view.memory_mb == sum(a.memory_mb for a in mine) <= view.capacity.memory_mb
        assert view.cores == len(mine) <= view.capacity.cores
    for ask in wanted:  # whatever failed fits nowhere now: nothing was released since
        if ask.uid in placed.failed:
            assert not any(v.fits(ask.cores, ask.memory_mb) for v in nodes)


def test_an_unsupported_backend_is_named_with_its_reason() -> None:
    away = BackendStatus(supported=False, reason="no /dev/kvm")
    nodes = [NodeView("a", "onprem", ROOM, {"vm": away}), NodeView("b", "onprem", ROOM, {})]
    placed = place_batch(asks(1, Need("vm")), nodes, random.Random(0))
    assert not placed.failed["u0"].hope
    error = placed.failed["u0"].error
    assert (error.code, error.field) == ("unsupported", "backend")
    assert "no /dev/kvm" in error.message


def test_a_limit_needs_its_enforcer() -> None:
    spec = SandboxSpec(backend="fake", disk_limit_mb=100, pids_limit=50)
    need = need_of(spec)
    assert need.features == {"disk_limit"}
    assert why_not(need, node("a")) is None
    without = BackendStatus(
        supported=True, features={"disk_limit": FeatureReport(supported=False, reason="ext4")}
    )
    assert why_not(need, node("a", backend=without)) == "disk_limit: ext4"
    no_pids = BackendStatus(
        supported=True,
        features={**FAKE.features, "pids_limit": FeatureReport(supported=False)},
    )
    assert why_not(need, node("a", backend=no_pids)) == "pids_limit: not supported"
    placed = place_batch(asks(1, need), [node("a", backend=without)], random.Random(0))
    error = placed.failed["u0"].error
    assert (error.code, error.field) == ("unsupported", "disk_limit_mb")


def test_excluded_cordoned_and_full_nodes_get_nothing() -> None:
    nodes = [node("a"), node("b", away="cordoned"), node("c")]
    need = Need("fake", exclude=frozenset({"a"}))
    placed = place_batch(asks(20, need), nodes, random.Random(0))
    assert set(placed.nodes.values()) == {"c"}
    none = place_batch(
        asks(1, Need("fake", exclude=frozenset({"a", "c"}))), nodes, random.Random(0)
    )
    error = none.failed["u0"].error
    assert error.code == "capacity_exhausted"
    assert error.message == "3 nodes: 2 refused it, 1 cordoned"


def test_without_nodes_it_is_a_matter_of_time() -> None:
    failure = place_batch(asks(1), [], random.Random(0)).failed["u0"]
    assert failure.hope
    assert (failure.error.code, failure.error.retryable) == ("capacity_exhausted", True)
    assert failure.error.message == "no node has joined"


def test_a_shortage_says_what_each_node_is_out_of() -> None:
    small = Resources(cores=100.0, memory_mb=1000, sandboxes=2)
    nodes = [
        node("a", away="lost"), node("b", away="over cpu pressure 0.98"),
        node("c", away="over cpu pressure 0.98"), node("d", room=small, memory_mb=901),
        node("e", room=small, sandboxes=2), node("f", room=Resources(1.0, 10, 10)),
        node("g", room=Resources(2.0, 1000, 9), cores=1.5),
        NodeView("h", "onprem", ROOM, {}),
    ]  # fmt: skip
    failure = place_batch(asks(1), nodes, random.Random(0)).failed["u0"]
    assert failure.hope
    assert failure.error.details["nodes"] == 8
    assert failure.error.message.startswith("8 nodes: 2 over cpu pressure 0.98, 1 ")
    (least,) = place_batch(asks(1), nodes[3:4], random.Random(0)).failed.values()
    assert least.error.message == "1 node: 1 without 100 MiB to give"
    two = place_batch(asks(1), nodes[:2], random.Random(0)).failed["u0"].error
    assert two.message == "2 nodes: 1 lost, 1 over cpu pressure 0.98"
    assert two.details["filters"] == {"lost": 1, "over cpu pressure 0.98": 1}


def test_what_no_node_is_large_enough_for_has_no_hope() -> None:
    small = node("a", room=Resources(cores=2.0, memory_mb=50, sandboxes=9))
    failure = place_batch(asks(1), [small], random.Random(0)).failed["u0"]
    assert not failure.hope
    assert (failure.error.code, failure.error.retryable) == ("capacity_exhausted", False)
    assert failure.error.message == "1 node: 1 not large enough for 1 cores and 100 MiB"
    away = place_batch(asks(1), [small, node("b", away="lost")], random.Random(0))
    assert away.failed["u0"].hope  # it may come back


def test_cloud_nodes_take_their_share_and_what_does_not_fit() -> None:
    nodes = [node("home"), node("cloud", pool="cloud")]
    at_home = place_batch(asks(100), nodes, random.Random(0))
    assert set(at_home.nodes.values()) == {"home"}
    shared = place_batch(asks(100), nodes, random.Random(0), cloud_share=0.5)
    assert 30 < Counter(shared.nodes.values())["cloud"] < 70
    small = Resources(cores=10.0, memory_mb=1000, sandboxes=10)
    nodes = [node("home", room=small), node("cloud", pool="cloud")]
    spilled = place_batch(asks(30), nodes, random.Random(0))
    assert Counter(spilled.nodes.values()) == {"home": 10, "cloud": 20}


def test_the_limit_is_reserved_else_the_request_else_the_default() -> None:
    given_ = {"default_cores": 0.5, "default_memory_mb": 64}
    assert amounts(SandboxSpec(), **given_) == (0.5, 64)
    both = SandboxSpec(cpu_cores_request=2.0, memory_limit_mb=4096, memory_request_mb=512)
    assert amounts(both, **given_) == (2.0, 4096)


def test_the_overlay_holds_a_placement_until_a_later_snapshot() -> None:
    overlay = Overlay()
    first = overlay.begin({"a": (1.0, 10, 1)})
    overlay.begin({"a": (1.0, 10, 1), "b": (2.0, 20, 2)})
    overlay.commit(first, at=5.0)
    assert overlay.snapshot(begun_at=5.0) == {"a": (2.0, 20, 2), "b": (2.0, 20, 2)}
    assert overlay.snapshot(begun_at=5.1) == {"a": (1.0, 10, 1), "b": (2.0, 20, 2)}
    overlay.abort(2)
    assert overlay.snapshot(begun_at=6.0) == {}


def test_a_branch_goes_where_its_source_is_or_nowhere() -> None:
    nodes = [node("n1"), node("n2")]
    need = need_of(SandboxSpec(backend="fake", source="0" * 26, node="n2"))
    placed = place_batch(asks(5, need), nodes, random.Random(1))
    assert set(placed.nodes.values()) == {"n2"}
    placed = place_batch(asks(1, need), [node("n1")], random.Random(1))
    assert "its source is on n2" in next(iter(placed.failed.values())).error.message
