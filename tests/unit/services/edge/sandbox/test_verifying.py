"""Leases of verifiers, and who is let in beside them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.sandbox.verifying import Kept, Lease, Scoring, refusal, released, taken
from shared.errors import Conflict, SandboxDied

times = st.floats(0, 1e5)


@given(times, st.floats(1, 600), st.floats(1, 3600))
def test_a_lease_is_held_for_what_was_asked_and_no_longer_than_its_most(
    now: float, lease_s: float, most: float
) -> None:
    kept = taken(Kept(), "a", lease_s, now=now, max_s=most)
    assert kept.held_s(now) == pytest.approx(min(lease_s, most), abs=1e-6)
    again = taken(kept, "a", 600.0, now=now + most * 0.9, max_s=most)
    assert again.lease is not None and again.lease.until <= now + most
    with pytest.raises(Conflict):
        taken(again, "a", lease_s, now=now + most, max_s=most)


def test_one_holds_it_at_a_time() -> None:
    kept = taken(Kept(), "a", 10.0, now=0.0, max_s=100.0)
    with pytest.raises(Conflict) as refused:
        taken(kept, "b", 10.0, now=9.0, max_s=100.0)
    assert refused.value.retry_after_s == 1.0
    other = taken(kept, "b", 10.0, now=10.0, max_s=100.0)
    assert other.lease == Lease("b", 20.0, 110.0)
    assert released(other, "a") == other
    assert released(other, "b").lease is None


def test_a_holder_that_was_only_late_has_it_again_within_its_most() -> None:
    kept = taken(Kept(), "a", 10.0, now=0.0, max_s=100.0, alone=True)
    again = taken(kept, "a", 10.0, now=50.0, max_s=100.0)
    assert again.lease == Lease("a", 60.0, 100.0, alone=True)


def test_beside_a_lease_others_are_let_in_unless_it_is_for_its_holder_alone() -> None:
    shared = Kept(lease=Lease("a", 10.0, 10.0))
    alone = Kept(lease=Lease("a", 10.0, 10.0, alone=True))
    assert refusal(shared, "", cleared=False, now=5.0) is None
    assert isinstance(refusal(alone, "", cleared=False, now=5.0), Conflict)
    assert isinstance(refusal(alone, "b", cleared=False, now=5.0), Conflict)
    assert refusal(alone, "a", cleared=False, now=5.0) is None
    assert refusal(alone, "", cleared=False, now=10.0) is None  # it has run out


def test_once_time_is_up_only_a_live_lease_is_let_in_and_only_after_the_agent_is_gone() -> None:
    kept = Kept(Scoring("deadline", 1.0), Lease("a", 10.0, 10.0))
    for holder, cleared, now in (("", True, 5.0), ("b", True, 5.0), ("a", False, 5.0),
                                 ("a", True, 10.0)):  # fmt: skip
        refused = refusal(kept, holder, cleared=cleared, now=now)
        assert isinstance(refused, SandboxDied)
        assert (refused.cause, refused.is_infra) == ("deadline", False)
    assert refusal(kept, "a", cleared=True, now=5.0) is None
