"""The queue for room: whose turn it is, and how many may wait."""

from __future__ import annotations

from schemas.base import WireError
from services.scheduler.model import Sandbox
from services.scheduler.turns import Queue, Turns, full, too_many


def waiting(project: str, count: int, *, at: float, cores: float = 1.0) -> list[Sandbox]:
    return [
        Sandbox(
            uid=f"{project}{i}", project=project, state="requested", generation=0,
            placed_generation=0, index=i, spec_idx=0, principal="p", backend="fake", cores=cores,
            memory_mb=100, expires_at=at + 60, created_at=at, changed_at=at, request_id=project,
            cause="capacity",
        )
        for i in range(count)
    ]  # fmt: skip


def test_projects_take_turns_and_each_keeps_its_order() -> None:
    rows = waiting("large", 3, at=1.0) + waiting("late", 2, at=5.0)
    order = [r.uid for r in Turns().order(reversed(rows))]
    assert order == ["large0", "late0", "large1", "late1", "large2"]


def test_turns_go_round_also_where_there_is_room_for_one_at_a_time() -> None:
    rows, turns, order = waiting("large", 3, at=1.0) + waiting("late", 3, at=5.0), Turns(), []
    rows += waiting("third", 1, at=9.0)
    while rows:
        first = turns.order(rows)[0]
        order.append(first.uid)
        rows.remove(first)
        turns.served([first.project], [r.project for r in rows])
    assert order == ["large0", "late0", "third0", "large1", "late1", "large2", "late2"]


def test_who_comes_to_the_queue_anew_has_no_claim_to_what_was_given_before() -> None:
    turns = Turns()
    turns.served(["old"] * 5, ["old"])
    rows = waiting("old", 2, at=1.0) + waiting("new", 2, at=2.0)
    assert [r.uid for r in turns.order(rows)] == ["old0", "new0", "old1", "new1"]


def test_the_queue_has_bounds_in_all_and_for_a_project() -> None:
    rows = waiting("a", 3, at=1.0) + waiting("b", 3, at=1.0)
    none = Queue({})
    assert too_many(rows, none, limit=10, project_limit=10) == []
    assert [r.uid for r in too_many(rows, none, limit=10, project_limit=2)] == ["a2", "b2"]
    assert [r.uid for r in too_many(rows, none, limit=4, project_limit=10)] == ["b1", "b2"]
    assert len(too_many(rows, Queue({"a": 2}), limit=10, project_limit=2)) == 4
    error = full(WireError(code="capacity_exhausted", message="1 node: 1 lost"), Queue({"a": 2}))
    assert error.message == "1 node: 1 lost; 2 creates wait for room already (wait_rows)"


def test_what_joins_the_queue_counts_at_once() -> None:
    queue = Queue({}).plus(waiting("a", 2, at=1.0, cores=4.0))
    assert (queue.total, queue.cores, queue.memory_mb) == (2, 4.0, 100)
    more = queue.plus(waiting("b", 1, at=1.0, cores=2.0))
    assert (dict(more.counts), more.cores) == ({"a": 2, "b": 1}, 2.0)
    assert more.plus([]) == more
