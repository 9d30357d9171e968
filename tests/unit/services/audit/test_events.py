"""Reports of every source become one form; a reporter's word is bounded."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from schemas.audit import Destination, Violation
from services.audit.chain import clean
from services.audit.events import TEXT_MAX, event
from services.audit.owners import Owner
from services.audit.records import AHEAD_S, from_violation, row

NOW = 1_800_000_000.0
UID = "01jd0000000000000000000000"
OWNER = Owner(UID, "n1", "p1", "k1", "j1", "")


def violation(**facts: Any) -> Violation:
    values = {
        "id": "v1", "at": NOW, "node": "liar", "uid": UID, "project": "liars", "source": "bpf_net",
        "verdict": "denied", "rule": "r", "mechanism": "m", **facts,
    }  # fmt: skip
    return Violation(**values)


def stored(told: Violation, node: str = "n1", owners: dict[str, Owner] | None = None) -> Any:
    known = {UID: OWNER} if owners is None else owners
    return from_violation(node, told, known, root="root", now=NOW)


def test_whose_a_sandbox_is_comes_from_nothing_in_the_report() -> None:
    kept = stored(violation())
    assert (kept.project, kept.principal, kept.record["node"]) == ("p1", "k1", "n1")
    assert kept.record["job"] == "j1"
    assert "task" not in kept.record
    assert kept.record["attribution"] == "own"


def test_a_node_speaks_for_its_own_sandboxes_only() -> None:
    for kept in (stored(violation(), node="n2"), stored(violation(), owners={})):
        assert (kept.project, kept.principal) == ("root", "")
        assert kept.record["attribution"] == "foreign"
    node = stored(violation(uid=""))
    assert (node.project, node.record["attribution"]) == ("root", "node")


def test_a_clock_that_is_ahead_is_set_to_ours_and_kept() -> None:
    assert stored(violation(at=NOW + AHEAD_S)).at == NOW + AHEAD_S
    kept = stored(violation(at=NOW + 10_000))
    assert (kept.at, kept.record["claimed_at"]) == (NOW, NOW + 10_000)


def test_sources_are_read_from_where_they_put_things() -> None:
    network = violation(
        destination=Destination(address="192.0.2.1", port=80, protocol="tcp", domain="A.example"),
        actor={"pid": 7, "comm": "curl", "dropped_bytes": 12},
    )  # fmt: skip
    made = event("n1/v1", stored(network).record)
    assert (made.address, made.port, made.domain) == ("192.0.2.1", 80, "a.example")
    assert (made.pid, made.comm, made.numbers) == (7, "curl", {"dropped_bytes": 12})
    assert made.target == "a.example:80"
    line = (
        'audit(1.5:7): apparmor="DENIED" operation="open" profile="dsec-x" '
        'name=2F62696E2F6D79207368 pid=9 comm="sh" requested_mask="wc" denied_mask="wc"'
    )
    aa = event("n1/v2", stored(violation(source="apparmor", subject=line)).record)
    assert (aa.action, aa.path, aa.comm, aa.pid) == ("write", "/bin/my sh", "sh", 9)
    forged = violation(source="apparmor", subject='x apparmor="DENIED" name="/bin/sh"')
    assert event("n1/v3", stored(forged).record).path == ""


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=9), anything, max_size=5), st.text(max_size=3_000))
def test_whatever_an_actor_holds_is_recorded_and_read(actor: dict[str, Any], text: str) -> None:
    told = violation(actor=actor, path=text, subject=text, source="apparmor")
    kept = stored(told)
    assert row(kept.kind, clean(kept.record)) == kept
    made = event(kept.record_id, kept.record)
    assert len(made.path) <= TEXT_MAX
    assert all(type(value) is int for value in made.numbers.values())


def test_a_count_is_never_taken_for_less_than_one() -> None:
    kept = stored(structs.replace(violation(), count=-5))
    assert event("n1/v1", kept.record).count == 1
