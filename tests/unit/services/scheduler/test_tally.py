"""Ends and repetitions are counted once each."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from services.scheduler.model import Changes, Sandbox
from services.scheduler.tally import COUNTED, Tally


def row(uid: str, **more: Any) -> Sandbox:
    known: dict[str, Any] = {
        "uid": uid, "project": "team", "state": "running", "generation": 1,
        "placed_generation": 1, "index": 0, "spec_idx": 0, "principal": "p", "backend": "fake",
        "cores": 1.0, "memory_mb": 100, "expires_at": 60.0, "created_at": 1.0, "changed_at": 1.0,
    }  # fmt: skip
    return Sandbox(**{**known, **more})


def counted(tally: Tally) -> dict[str, int]:
    return {name: tally[name] for name in COUNTED}


def test_ends_are_counted_by_what_a_trainer_masks() -> None:
    tally, changes = Tally(), Changes()
    before = [row("a"), row("b"), row("c"), row("d", state="stopped")]
    changes.load(before)
    changes.rows["a"] = replace(before[0], state="stopped", cause="completed")
    changes.rows["b"] = replace(before[1], state="lost", cause="node_lost", is_infra=True)
    changes.rows["d"] = replace(before[3], message="said again")
    changes.rows["e"] = row("e", state="rejected", is_infra=True)
    tally.add(changes)
    assert counted(tally) == {"ended": 3, "ended_infra": 2, "lost": 1, "placed_again": 0}


def test_another_node_after_a_refusal_is_a_repetition() -> None:
    tally, changes = Tally(), Changes()
    changes.load([row("a", state="placed", tried=("n1",)), row("b", state="placed")])
    changes.rows["a"] = replace(changes.was["a"], tried=("n1", "n2"))
    changes.rows["b"] = replace(changes.was["b"], state="running")
    tally.add(changes)
    assert counted(tally)["placed_again"] == 1
