"""Grants: what covers what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from schemas.grants import GRANTS
from services.auth.delegation import (
    ENTITIES,
    covers,
    effective,
    expand,
    holds,
    known,
    uncovered,
)  # fmt: skip

grants = st.sampled_from(sorted(GRANTS | {f"{e}.*" for e in ENTITIES} | {"*"}))
some_grants = st.lists(grants, max_size=6)


@given(grants, grants)
def test_what_covers_a_grant_opens_all_it_opens(held: str, wanted: str) -> None:
    if covers(held, wanted):
        assert expand(wanted) <= expand(held)


@given(grants, grants, grants)
def test_covering_is_transitive(a: str, b: str, c: str) -> None:
    if covers(a, b) and covers(b, c):
        assert covers(a, c)


@given(some_grants, some_grants)
def test_uncovered_is_exactly_what_is_not_held(held: list[str], wanted: list[str]) -> None:
    missing = uncovered(held, wanted)
    assert all(not holds(held, g) for g in missing)
    assert all(holds(held, g) for g in wanted if g not in missing)


@given(some_grants, some_grants, some_grants)
def test_delegation_never_widens(first: list[str], second: list[str], third: list[str]) -> None:
    """Whatever is handed on, twice, opens nothing that the first did not have."""
    second = [g for g in second if holds(first, g)]
    third = [g for g in third if holds(second, g)]
    opened = frozenset().union(*map(expand, third))
    assert opened <= frozenset().union(*map(expand, first))


def test_single_verbs_do_not_make_a_wildcard() -> None:
    everything = sorted(g for g in GRANTS if g.startswith("sandbox."))
    assert uncovered(everything, ["sandbox.*"]) == ["sandbox.*"]
    assert uncovered(sorted(GRANTS), ["*"]) == ["*"]
    assert uncovered(["sandbox.*"], everything) == []


def test_only_what_exists_is_known() -> None:
    assert all(known(g) for g in GRANTS)
    assert not any(map(known, ("sandbox.fly", "ship.*", "", "sandbox", "*.*", "sandbox.")))


def test_routes_are_granted_by_the_names_that_operators_give_them() -> None:
    assert all(map(known, ("route.bus", "route.model-7", "route.*")))
    assert not any(map(known, ("route.", "route.Model", "route.a.b")))
    assert uncovered(["route.bus", "sandbox.*"], ["route.bus", "route.model"]) == ["route.model"]
    assert uncovered(["route.*"], ["route.bus", "route.model"]) == []
    assert expand("route.*") == frozenset()  # no subject of the bus


@given(st.dictionaries(st.sampled_from("abcd"), some_grants))
def test_grants_hold_below_and_not_above_or_aside(given_: dict[str, list[str]]) -> None:
    assert effective(["a", "b"], given_) == set(given_.get("a", ())) | set(given_.get("b", ()))
    assert effective(["a"], given_) == set(given_.get("a", ()))
