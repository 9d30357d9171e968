"""How long names keep addresses open."""

from __future__ import annotations

import ipaddress

from services.edge.egress.grants import ADDRESSES_MAX, GRACE_S, HOLD_S, NAMES_MAX, Grants

A, B = ipaddress.ip_address("192.0.2.1"), ipaddress.ip_address("192.0.2.2")


def test_a_short_time_to_live_is_held_for_a_while() -> None:
    grants = Grants()
    assert grants.add("a", [A], 0, now=0.0)
    assert grants.expire(HOLD_S) == [] and grants.names(A) == ["a"]
    assert grants.expire(HOLD_S + GRACE_S) == [A] and grants.names(A) == []


def test_an_address_is_open_while_one_of_its_names_is() -> None:
    grants = Grants()
    grants.add("a", [A], 10, now=0.0)
    grants.add("b", [A, B], 1000, now=0.0)
    assert grants.addresses("b") == [A, B]
    assert grants.expire(500.0) == [A]
    assert grants.names(A) == ["b"]


def test_an_older_answer_does_not_shorten_a_newer_one() -> None:
    grants = Grants()
    grants.add("a", [A], 1000, now=0.0)
    grants.add("a", [A], 0, now=1.0)
    assert grants.expire(500.0) == []


def test_names_open_no_more_than_so_many_addresses() -> None:
    grants = Grants()
    many = [ipaddress.ip_address(0x0A000000 + n) for n in range(ADDRESSES_MAX + 1)]
    assert grants.add("a", many, 1, now=0.0) == many[:-1]
    assert grants.add("b", [many[-1], many[0]], 1, now=0.0) == [many[0]]
    assert len(grants.until) == ADDRESSES_MAX


def test_of_many_names_of_an_address_the_latest_are_kept() -> None:
    grants = Grants()
    for n in range(NAMES_MAX + 5):
        grants.add(f"n{n}.a", [A], 1, now=float(n))
    assert grants.names(A) == [f"n{n}.a" for n in range(5, NAMES_MAX + 5)]
