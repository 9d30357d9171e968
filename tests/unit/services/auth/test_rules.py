"""Bounded delegation and quotas inside quotas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.grants import GRANTS
from schemas.iam import Limits
from services.auth import rules
from services.auth.delegation import holds
from shared.errors import Conflict, Forbidden, InvalidRequest, QuotaExceeded

grants = st.lists(st.sampled_from([*sorted(GRANTS), "sandbox.*", "node.*", "*"]), max_size=5)
amounts = st.none() | st.integers(0, 50)
limits = st.builds(
    Limits, sandboxes=amounts, cores=st.none() | st.floats(0, 50), memory_mb=amounts,
    creations_per_s=st.none() | st.floats(0.1, 50),
)  # fmt: skip


@given(grants, grants)
def test_what_may_be_given_is_held(held: list[str], wanted: list[str]) -> None:
    if all(holds(held, g) for g in wanted):
        rules.may_give(held, wanted)
        return
    with pytest.raises(Forbidden) as caught:
        rules.may_give(held, wanted)
    assert caught.value.field == "grants"


def test_unknown_grants_are_no_grants() -> None:
    with pytest.raises(InvalidRequest, match="fly"):
        rules.may_give(["*"], ["sandbox.fly"])


@given(limits, st.dictionaries(st.sampled_from("abc"), limits))
def test_a_quota_within_its_ancestors_is_never_the_looser_one(
    asked: Limits, above: dict[str, Limits]
) -> None:
    def bounds(name: str) -> list[float]:
        return [m for a in above.values() if (m := getattr(a, name)) is not None]

    try:
        rules.quota_within(asked, above, field="limits")
    except QuotaExceeded as exc:
        name = str(exc.field).removeprefix("limits.")
        assert getattr(asked, name) > min(bounds(name))
        return
    for name in rules.DIMENSIONS:
        mine = getattr(asked, name)
        assert mine is None or all(mine <= most for most in bounds(name))


@given(
    st.floats(0, 1e9), st.none() | st.floats(1, 1e6), st.none() | st.floats(0, 2e9)
)
def test_a_key_ends_no_later_than_its_makers(
    now: float, asked: float | None, giver: float | None
) -> None:
    try:
        end = rules.key_expiry(now, asked, giver_expires_at=giver)
    except Forbidden:
        assert giver is not None
        return
    if giver is not None:
        assert end is not None
        assert end <= giver


def test_keys_of_nodes_and_services_need_the_root() -> None:
    for kind, node in (("node", "n1"), ("service", None)):
        with pytest.raises(Forbidden):
            rules.may_make_key(kind, node, [], held=["*"], held_at_root=["sandbox.*"])
        rules.may_make_key(kind, node, [], held=["*"], held_at_root=["node.*"])
    for kind, node in (("node", None), ("user", "n1")):
        with pytest.raises(InvalidRequest) as caught:
            rules.may_make_key(kind, node, [], held=["*"], held_at_root=["*"])
        assert caught.value.field == "node"
    with pytest.raises(InvalidRequest):
        rules.may_make_key("node", "n1", ["sandbox.get"], held=["*"], held_at_root=["*"])


def test_only_empty_projects_go() -> None:
    rules.may_delete_project(children=0, sandboxes=0, is_root=False)
    with pytest.raises(Forbidden):
        rules.may_delete_project(children=0, sandboxes=0, is_root=True)
    for children, sandboxes in ((1, 0), (0, 1)):
        with pytest.raises(Conflict):
            rules.may_delete_project(children=children, sandboxes=sandboxes, is_root=False)
