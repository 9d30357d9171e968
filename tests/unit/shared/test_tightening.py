"""A tightening only takes away, and nothing that is more specific gets around it."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.sandbox import SandboxSpec, Tightening
from services.edge.policy.reach import Reach
from shared import policies
from shared.errors import InvalidRequest, Unsupported

QOS = "latency_sensitive"

A = ipaddress.ip_address


def reach(rules: dict[str, bool], *network: str) -> Reach:
    policy = policies.read(None, rules)
    return Reach(policies.tightened(policy, Tightening(network=list(network))).network, {})


def test_everything_leaves_no_way_out() -> None:
    rules = {"pypi": True, "good.test": True, "203.0.113.0/24": True, "*": True}
    policy = policies.tightened(policies.read(None, rules), policies.EVERYTHING)
    assert not policy.reaches_out


def test_a_block_is_closed_with_all_that_is_in_it() -> None:
    found = reach({"203.0.113.0/24": True, "203.0.113.7:8080": True, "198.51.100.1": True},
                  "203.0.113.0/24")  # fmt: skip
    assert not found.address(A("203.0.113.7"), 8080).allow
    assert not found.address(A("203.0.113.9"), 80).allow
    assert found.address(A("198.51.100.1"), 80).allow


def test_a_port_is_closed_where_a_narrower_rule_opens_it() -> None:
    found = reach({"203.0.113.7": True}, "203.0.113.0/24:22")
    assert not found.address(A("203.0.113.7"), 22).allow
    assert found.address(A("203.0.113.7"), 80).allow


def test_a_name_is_closed_at_every_port_and_with_the_names_below_it() -> None:
    rules = {"good.test:8443": True, "a.good.test": True, "other.test": True}
    found = reach(rules, "*.good.test", "good.test")
    for name in ("good.test", "a.good.test", "b.good.test"):
        assert found.ports(name) == [] and not found.named(name).allow
    assert found.named("other.test").allow


TARGETS = st.sampled_from(
    ["203.0.113.0/24", "203.0.113.7", "203.0.113.7:22", "203.0.113.0/25:22", "198.51.100.0/24",
     "good.test", "a.good.test", "*.good.test", "good.test:8443", "*"]
)  # fmt: skip


@given(
    st.dictionaries(TARGETS, st.booleans(), max_size=5), st.lists(TARGETS, min_size=1, max_size=3)
)
def test_nothing_is_open_that_was_not(rules: dict[str, bool], network: list[str]) -> None:
    before, after = reach(rules), reach(rules, *network)
    for address in ("203.0.113.7", "203.0.113.200", "198.51.100.1", "8.8.8.8"):
        for port in (22, 80, 8443):
            if after.address(A(address), port).allow:
                assert before.address(A(address), port).allow
    for name in ("good.test", "a.good.test", "b.good.test"):
        assert set(after.ports(name)) <= set(before.ports(name))


def test_calls_are_added_and_what_cannot_change_is_refused() -> None:
    policy = policies.read({"processes": {"deny": ["bpf"]}}, {})
    wanted = Tightening(deny=["ptrace", "bpf", "ioctl:0xC0C0586D"])
    found = policies.tightened(policy, wanted)
    assert found.deny == ("bpf", "ptrace") and found.ioctls == (0xC0C0586D,)
    with pytest.raises(Unsupported):
        policies.tightened(policy, Tightening(deny=["exec:/bin/sh"]))
    with pytest.raises(InvalidRequest):
        policies.tightened(policy, Tightening(network=["not a host"]))


def test_two_tightenings_are_both_in_force() -> None:
    one, two = Tightening(network=["a.test"]), Tightening(network=["b.test"], deny=["bpf"])
    assert policies.merged(None, one) == one
    assert policies.merged(policies.merged(one, two), one) == Tightening(
        network=["a.test", "b.test"], deny=["bpf"]
    )


def test_what_continues_a_sandbox_is_under_its_policy_and_both_tightenings() -> None:
    own = SandboxSpec(network_rules={"pypi": True}, tighten=Tightening(deny=["ptrace"]), qos=QOS)
    source = SandboxSpec(policy={}, offline=True, tighten=Tightening(network=["*"]))
    spec = policies.carried(own, source)
    assert (spec.network_rules, spec.policy, spec.offline, spec.qos) == ({}, {}, True, QOS)
    assert spec.tighten == Tightening(network=["*"], deny=["ptrace"])
    assert policies.carried(own, SandboxSpec()).tighten == own.tighten
    assert policies.carried(SandboxSpec(), source).tighten == source.tighten
