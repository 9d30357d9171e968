"""Which rule counts: for addresses, for names, and for what a name resolved to."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.policy.reach import Entry, Reach, parse_services
from services.edge.policy.services import PUBLIC
from shared import policies
from shared.errors import InvalidRequest
from shared.policies.network import NEVER

SERVICES = {"pypi": ["pypi.example", "*.files.example"]}



def of(rules: dict[str, bool]) -> Reach:
    return Reach(policies.read(None, rules).network, SERVICES)


def allows(found: Reach, address: str, port: int = 443) -> bool:
    return found.address(ipaddress.ip_address(address), port).allow


def test_nothing_is_reached_by_default() -> None:
    found = of({})
    assert not allows(found, "192.0.2.1") and not allows(found, "2001:db8::1")
    assert not found.named("pypi.example").allow


@pytest.mark.parametrize(
    ("rules", "address", "port", "allowed"),
    [
        ({"203.0.113.0/24": True}, "203.0.113.9", 1, True),
        ({"203.0.113.0/24": True}, "203.0.114.9", 1, False),
        ({"203.0.113.0/24:443": True}, "203.0.113.9", 80, False),
        ({"203.0.113.0/24": True, "203.0.113.7": False}, "203.0.113.7", 443, False),
        ({"203.0.113.0/24": False, "203.0.113.7": True}, "203.0.113.7", 443, True),
        ({"203.0.113.0/24:443": True, "203.0.113.7:22": True}, "203.0.113.7", 443, True),
        ({"203.0.113.0/24:443": True, "203.0.113.7:22": True}, "203.0.113.8", 22, False),
        ({"tcp:203.0.113.7": True, "203.0.113.7:22": False}, "203.0.113.7", 22, False),
        ({"udp:203.0.113.7": True}, "203.0.113.7", 53, False),
        ({"*": True}, "8.8.8.8", 443, True),
        ({"*": True}, "2a00::1", 443, True),
        ({"*": True}, "10.1.2.3", 443, False),
        ({"*": True}, "fc00::1", 443, False),
        ({"*": True, "10.0.0.0/8:5432": True}, "10.1.2.3", 5432, True),
        ({"*": True, "10.0.0.0/8:5432": True}, "10.1.2.3", 443, False),
        ({"10.1.2.3": True}, "10.1.2.3", 9, True),
        ({"*:443": True}, "8.8.8.8", 80, False),
        ({"*": True, "::ffff:203.0.113.5": False}, "203.0.113.5", 443, False),
        ({"*": True, "[::ffff:203.0.113.5]:22": False}, "203.0.113.5", 22, False),
        ({"*": True, "[::ffff:203.0.113.5]:22": False}, "203.0.113.5", 443, True),
        ({"*": True, "::ffff:203.0.113.0/120": False}, "203.0.113.9", 443, False),
        ({"*": True, "::ffff:203.0.113.0/120": False}, "203.0.114.9", 443, True),
    ],
)
def test_the_more_specific_rule_counts(
    rules: dict[str, bool], address: str, port: int, allowed: bool
) -> None:
    assert allows(of(rules), address, port) is allowed


@given(st.data())
def test_what_is_never_reached_is_not_even_by_everything(data: st.DataObject) -> None:
    block = data.draw(st.sampled_from(NEVER))
    number = data.draw(st.integers(0, block.num_addresses - 1))
    found = of({"*": True, "128.0.0.0/1": True, "fc00::/6": True})
    assert not found.address(block[number], data.draw(st.integers(0, 65535))).allow


@given(
    st.dictionaries(
        st.builds(
            lambda a, n, p: f"{ipaddress.ip_network((a >> (32 - n) << (32 - n), n))}{p}",
            st.integers(0x50000000, 0x50FFFFFF), st.integers(8, 32),
            st.sampled_from(["", ":443", ":1-100"]),
        ),
        st.booleans(), max_size=6,
    ),
    st.integers(0x50000000, 0x50FFFFFF), st.sampled_from([1, 100, 443, 8080]),
)  # fmt: skip
def test_the_compiled_entries_say_what_a_reading_of_the_rules_says(
    rules: dict[str, bool], number: int, port: int
) -> None:
    """The longest prefix with a rule about the port counts; of equals the one that denies."""
    address = ipaddress.ip_address(number)
    about = [
        r for r in policies.read(None, rules).network
        if r.block and address in r.block and r.covers(port)
    ]  # fmt: skip
    longest = max((r.block.prefixlen for r in about if r.block), default=-1)
    same = [r.allow for r in about if r.block and r.block.prefixlen == longest]
    assert of(rules).address(address, port).allow is (bool(same) and all(same))


def test_names_are_matched_whole_or_below() -> None:
    found = of({"a.example": True, "*.b.example": True, "x.b.example": False})
    assert found.named("A.example.").allow and found.named("y.b.example").allow
    assert found.named("z.y.b.example").allow
    for name in ("b.example", "xb.example", "nota.example", "a.example.evil", "x.b.example"):
        assert not found.named(name).allow, name


def test_a_services_hosts_are_the_nodes_to_say() -> None:
    found = of({"pypi": True, "pypi.example": False})
    assert not found.named("pypi.example").allow
    assert found.ports("one.files.example") == [(443, 443), (80, 80)]
    assert parse_services("npm=a.example,*.b.example; pypi=c.example") == {
        "npm": ["a.example", "*.b.example"], "pypi": ["c.example"],
    }  # fmt: skip
    with pytest.raises(InvalidRequest):
        parse_services("npm")
    assert set(PUBLIC) == {"pypi", "npm", "go-proxy", "github"}


def test_ports_of_a_name_that_are_denied_are_not_opened() -> None:
    assert of({"a.example": True, "a.example:80": False}).ports("a.example") == [(443, 443)]
    assert of({"a.example:*": False, "a.example": True}).ports("a.example") == []


@pytest.mark.parametrize(
    ("rules", "name", "address", "opens"),
    [
        ({"a.example": True}, "a.example", "203.0.113.1", True),
        ({"a.example": True}, "a.example", "10.0.0.1", True),
        ({"*.a.example": True}, "x.a.example", "10.0.0.1", False),
        ({"a.example": True}, "a.example", "127.0.0.1", False),
        ({"a.example": True}, "a.example", "169.254.169.254", False),
        ({"a.example": True}, "a.example", "::ffff:10.0.0.1", False),
        ({"a.example": True, "203.0.113.0/24": False}, "a.example", "203.0.113.1", False),
    ],
)
def test_a_name_opens_only_what_it_may(
    rules: dict[str, bool], name: str, address: str, opens: bool
) -> None:
    assert of(rules).may_open(name, ipaddress.ip_address(address)).allow is opens


@pytest.mark.parametrize(
    ("rules", "port", "reaches"),
    [
        ({"n.example": True, "203.0.113.1:443": False}, 443, False),
        ({"n.example": True, "203.0.113.1:443": False}, 80, True),
        ({"n.example": True, "203.0.113.1": False}, 80, False),
        ({"n.example": True}, 22, False),
        ({"n.example": True, "203.0.113.1:22": True}, 22, False),
        ({"n.example": False, "203.0.113.1": True}, 443, False),
        ({}, 443, False),
    ],
)
def test_a_name_leads_past_no_rule_about_an_address(
    rules: dict[str, bool], port: int, reaches: bool
) -> None:
    """(N02)"""
    found = of(rules).through("n.example", ipaddress.ip_address("203.0.113.1"), port)
    assert found.allow is reaches


def test_an_opened_address_keeps_what_denies_a_port() -> None:
    found = of({"a.example:*": True, "203.0.113.1:22": False})
    entry = found.opened(ipaddress.ip_address("203.0.113.1"), found.ports("a.example"))
    assert isinstance(entry, Entry)
    first = next(r for r in entry.ports if r.low <= 22 <= r.high)
    assert not first.allow and entry.ports[1].allow


def test_too_many_rules_about_ports_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        of({f"203.0.113.1:{port}": True for port in range(1, 10)})
