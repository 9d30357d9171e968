"""What observations, operations and time do to a sandbox."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.base import WireError
from schemas.sandbox import Observation, OpCommand, SandboxOpRequest
from services.scheduler import decide, nodes, operating, reads
from services.scheduler.decide import Deadlines
from services.scheduler.model import Changes, Sandbox
from services.scheduler.placement import Failure
from shared import lifecycle as life

UID = "01hzzzzzzzzzzzzzzzzzzzzzzz"
AFTER = Deadlines(start_again_s=5, op_again_s=5, missing_s=10, attempts=3)


def sandbox(state: str, **kw) -> Sandbox:
    values = {
        "uid": UID, "project": "lab", "state": state, "generation": 1, "placed_generation": 1,
        "index": 0, "spec_idx": 0, "principal": "p", "backend": "fake", "cores": 1.0,
        "memory_mb": 100, "expires_at": 1000.0, "created_at": 1.0, "changed_at": 1.0,
        "node": None if state in (life.REQUESTED, life.REJECTED) else "n1", "request_id": UID,
        "running_at": 5.0 if state in (life.RUNNING, life.PAUSED, life.PAUSING) else None,
    }  # fmt: skip
    return Sandbox(**{**values, **kw})


def changes(row: Sandbox) -> Changes:
    made = Changes()
    made.load([row])
    return made


def see(row: Sandbox, observed: str, *, node: str = "n1", generation: int | None = None, **kw):
    made = changes(row)
    generation = row.generation if generation is None else generation
    seen = Observation(uid=UID, generation=generation, observed=observed, at=100.0, **kw)
    decide.observed(made, node, seen, now=100.0, deadlines=AFTER)
    return made, made.rows[UID]


def operate(row: Sandbox, verb: str, **kw):
    made = changes(row)
    request = SandboxOpRequest(request_id="01hop0000000000000000000op", uids=[UID], **kw)
    command = OpCommand(project="lab", principal="p", verb=verb, request=request)
    return made, operating.operate(made, UID, command, at=50.0, deadlines=AFTER)


@pytest.mark.parametrize("state", life.STATES)
def test_stop_is_legal_in_every_state(state: str) -> None:
    """(L06)"""
    row = sandbox(state)
    made, error = operate(row, "stop")
    after = made.rows[UID]
    assert error is None
    if row.terminal:
        assert after.state == state
    elif state == life.REQUESTED:
        assert (after.state, after.cause) == (life.STOPPED, "cancelled")
    else:
        assert after.state == life.STOPPING
        assert after.op_id is not None
        generation = 1 if state == life.STOPPING else 2  # asked again: the same command
        assert [(o.verb, o.node, o.generation) for o in made.ops] == [("stop", "n1", generation)]


def test_a_stop_before_the_start_beats_a_late_running() -> None:
    made, _ = operate(sandbox(life.PLACED), "stop")
    stopping = made.rows[UID]
    _, late = see(stopping, "running", generation=1)
    assert late.state == life.STOPPING
    _, gone = see(stopping, "stopped")
    assert (gone.state, gone.cause) == (life.STOPPED, "cancelled")


def test_an_observation_of_an_ended_sandbox_that_lives_is_answered_with_a_stop() -> None:
    """(B14)"""
    made, row = see(sandbox(life.LOST, generation=2), "running", generation=1)
    assert row.state == life.LOST
    assert [(o.verb, o.node) for o in made.ops] == [("stop", "n1")]
    made, _ = see(sandbox(life.RUNNING), "running", node="n2")
    assert [(o.verb, o.node) for o in made.ops] == [("stop", "n2")]
    nobody = Changes()
    seen = Observation(uid=UID, generation=1, observed="running", at=1.0)
    decide.observed(nobody, "n3", seen, now=1.0, deadlines=AFTER)
    assert [(o.verb, o.node) for o in nobody.ops] == [("stop", "n3")]


def test_a_refusal_excludes_the_node_until_attempts_are_used_up() -> None:
    made, row = see(sandbox(life.PLACED), "refused", message="full")
    assert (row.state, row.node, row.tried, made.place) == (life.REQUESTED, None, ("n1",), [UID])
    tried = sandbox(life.PLACED, tried=("a", "b"))
    made, row = see(tried, "refused", message="full")
    assert (row.state, row.tried, row.error) == (life.REQUESTED, (), None)  # later, anywhere
    assert row.message == "refused by a, b, n1: full"
    assert row.deadline_at == 101.0
    assert made.place == []
    late = sandbox(life.PLACED, tried=("a", "b"), expires_at=100.5)
    made, row = see(late, "refused", message="full")
    assert (row.state, row.cause, row.is_infra) == (life.REJECTED, "capacity", True)
    assert row.error is not None
    assert row.error.code == "capacity_exhausted"


LOST = WireError(
    code="capacity_exhausted", message="1 node: 1 lost", cause="capacity", is_infra=True,
    retryable=True, retry_after_s=5.0,
)  # fmt: skip


def unplaced(row: Sandbox, failure: Failure, *, at: float = 100.0) -> tuple[Changes, Sandbox]:
    made = changes(row)
    decide.unplaced(made, row, failure, at=at, deadlines=AFTER)
    return made, made.rows[UID]


def test_a_create_waits_for_room_until_shortly_before_its_deadline() -> None:
    made, row = unplaced(sandbox(life.REQUESTED), Failure(LOST, hope=True))
    assert decide.waits(row)
    assert (row.message, row.error, row.deadline_at) == ("1 node: 1 lost", None, 999.0)
    assert not made.steps
    made, again = unplaced(row, Failure(LOST, hope=True), at=200.0)
    assert made.changed() == []  # what waits on is not written again
    made = changes(again)
    decide.overdue(made, again, now=999.0, deadlines=AFTER)
    assert made.place == [UID]  # once more
    _, row = unplaced(again, Failure(LOST, hope=True), at=999.0)
    assert (row.state, row.cause, row.is_infra) == (life.REJECTED, "capacity", True)
    assert row.error == LOST


def test_one_that_waited_while_no_scheduler_ran_is_refused_for_capacity() -> None:
    waiting = unplaced(sandbox(life.REQUESTED), Failure(LOST, hope=True))[1]
    made = changes(waiting)
    decide.overdue(made, waiting, now=1000.0, deadlines=AFTER)
    row = made.rows[UID]
    assert row.state == life.REJECTED
    assert row.error is not None
    assert (row.error.code, row.error.message) == ("capacity_exhausted", "1 node: 1 lost")


def test_one_that_waited_is_placed_and_stopped_like_any_other() -> None:
    waiting = unplaced(sandbox(life.REQUESTED), Failure(LOST, hope=True))[1]
    made = changes(waiting)
    row = decide.place(made, waiting, "n1", at=120.0, deadlines=AFTER)
    assert (row.state, row.cause, row.message) == (life.PLACED, None, "")
    made, error = operate(waiting, "stop")
    assert error is None
    assert (made.rows[UID].state, made.rows[UID].cause) == (life.STOPPED, "cancelled")


def test_what_can_never_be_satisfied_is_refused_at_once() -> None:
    large = WireError(code="capacity_exhausted", message="1 node: 1 not large enough")
    for failure in (Failure(large), Failure(WireError(code="unsupported", message="no vm"))):
        _, row = unplaced(sandbox(life.REQUESTED), failure)
        assert (row.state, row.error) == (life.REJECTED, failure.error)


def test_nodes_that_refused_for_want_of_room_are_asked_again_less_and_less_often() -> None:
    full = WireError(code="capacity_exhausted", message="cpu pressure 0.99 over 0.98")
    pauses = []
    for generation in (1, 2, 3, 4, 9):
        row = sandbox(life.REQUESTED, generation=generation, tried=("n1",), error=full)
        made, row = unplaced(row, Failure(LOST, hope=True, refused=True))
        assert (row.state, row.tried, row.error) == (life.REQUESTED, (), None)
        assert "cpu pressure 0.99 over 0.98" in row.message
        assert row.deadline_at is not None
        pauses.append(row.deadline_at - 100.0)
        decide.overdue(made, row, now=row.deadline_at, deadlines=AFTER)
        assert made.place == [UID]
    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]
    denied = WireError(code="policy_denied", message="no enforcer")
    row = sandbox(life.REQUESTED, tried=("n1",), error=denied)
    assert unplaced(row, Failure(LOST, hope=True, refused=True))[1].error == denied
    assert decide.waits(unplaced(row, Failure(LOST, hope=True))[1])  # others may take it


def test_the_last_refusal_for_policy_is_told_as_such() -> None:
    error = WireError(code="policy_denied", message="no enforcer", field="network_rules")
    tried = sandbox(life.PLACED, tried=("a", "b"))
    _, row = see(tried, "refused", error=error)
    assert row.error == error


@pytest.mark.parametrize(
    ("observed", "cause", "state", "told", "infra"),
    [
        ("failed", None, life.FAILED, "runtime", True),
        ("failed", "oom", life.FAILED, "oom", False),
        ("stopped", None, life.STOPPED, "completed", False),
        ("stopped", "idle_timeout", life.STOPPED, "idle_timeout", False),
        ("unknown", None, life.LOST, "node_lost", True),
        ("failed", "nonsense", life.FAILED, "runtime", True),
    ],
)
def test_every_end_has_a_cause(observed, cause, state, told, infra) -> None:
    _, row = see(sandbox(life.RUNNING), observed, cause=cause)
    assert (row.state, row.cause, row.is_infra) == (state, told, infra)


def test_a_start_that_ends_is_an_error_to_its_creator() -> None:
    """(L28)"""
    for observed in ("failed", "stopped", "unknown"):
        _, row = see(sandbox(life.STARTING), observed)
        assert row.error is not None
        assert row.error.code == "sandbox_died"
    made = changes(sandbox(life.STARTING))
    decide.overdue(made, made.rows[UID], now=1000.0, deadlines=AFTER)
    row = made.rows[UID]
    assert (row.state, row.cause) == (life.FAILED, "start_timeout")
    assert row.error is not None
    assert row.error.code == "deadline_exceeded"
    assert [o.verb for o in made.ops] == ["stop"]


@pytest.mark.parametrize(
    ("state", "verb"),
    [(life.PAUSING, "pause"), (life.RESUMING, "resume"), (life.STOPPING, "stop")],
)
def test_an_unanswered_operation_is_asked_again(state: str, verb: str) -> None:
    """(L14)"""
    made = changes(sandbox(state, generation=4, deadline_at=10.0))
    decide.overdue(made, made.rows[UID], now=11.0, deadlines=AFTER)
    assert [(o.verb, o.generation) for o in made.ops] == [(verb, 4)]
    assert made.rows[UID].deadline_at == 16.0


def test_a_placed_sandbox_without_a_word_is_sent_again() -> None:
    made = changes(sandbox(life.PLACED, deadline_at=10.0))
    decide.overdue(made, made.rows[UID], now=11.0, deadlines=AFTER)
    assert made.again == [UID]
    assert made.rows[UID].deadline_at == 16.0


def test_a_pause_where_it_has_no_meaning_is_a_conflict() -> None:
    for state in (life.REQUESTED, life.PLACED, life.STOPPING, life.STOPPED):
        made, result = operate(sandbox(state), "pause")
        assert result is not None
        assert result.error is not None
        assert result.error.code == "conflict"
        assert made.changed() == []


def test_a_foreign_sandbox_does_not_exist() -> None:
    made, result = operate(sandbox(life.RUNNING, project="other"), "stop")
    assert result is not None
    assert result.error is not None
    assert result.error.code == "not_found"
    assert made.ops == []


observations = st.lists(
    st.tuples(
        st.sampled_from(
            ["starting", "running", "refused", "failed", "stopped", "paused", "resumed", "unknown"]
        ),
        st.integers(0, 4),
        st.sampled_from(["n1", "n2"]),
        st.sampled_from([None, "stop", "pause", "resume", "overdue"]),
    ),
    max_size=12,
)


@settings(max_examples=400, deadline=None)
@given(start=st.sampled_from([s for s in life.STATES if s != life.REJECTED]), history=observations)
def test_whatever_comes_the_books_balance(start, history) -> None:
    """Whatever order things come in: an end is an end, a row on a node has one, each
    step continues the last, and reservations equal what is there (L07)."""
    row = sandbox(start)
    made = changes(row)
    ended: Sandbox | None = row if row.terminal else None
    for observed, generation, node, verb in history:
        seen = Observation(uid=UID, generation=generation, observed=observed, at=9.0)
        decide.observed(made, node, seen, now=9.0, deadlines=AFTER)
        if verb == "overdue":
            decide.overdue(made, made.rows[UID], now=9.0, deadlines=AFTER)
        elif verb:
            request = SandboxOpRequest(request_id=UID, uids=[UID])
            command = OpCommand(project="lab", principal="p", verb=verb, request=request)
            operating.operate(made, UID, command, at=9.0, deadlines=AFTER)
        if UID in made.place and made.rows[UID].state == life.REQUESTED:
            made.place.clear()
            decide.place(made, made.rows[UID], "n2", at=9.0, deadlines=AFTER)
        now = made.rows[UID]
        if ended is not None:
            assert (now.state, now.cause) == (ended.state, ended.cause)
        ended = now if now.terminal else None
    after = made.rows[UID]
    assert not after.on_node or after.node
    assert not after.terminal or after.cause or row.terminal
    state = start
    for step in made.steps:
        assert step.source == state
        state = step.target
    assert state == after.state
    moved = nodes.deltas(made.was, made.changed())
    held = {r.node: 1 for r in [after] if r.on_node}
    before = {r.node: 1 for r in [row] if r.on_node}
    for name in ("n1", "n2"):
        assert before.get(name, 0) + moved.get(name, (0, 0, 0))[2] == held.get(name, 0)


def test_a_sandbox_found_again_is_not_missing() -> None:
    flagged = sandbox(life.RUNNING, deadline_at=10.0)
    _, row = see(flagged, "running")
    assert row.deadline_at is None
    made = changes(flagged)
    decide.overdue(made, flagged, now=11.0, deadlines=AFTER)
    assert made.rows[UID].state == life.LOST


def test_an_operation_ends_its_wait_with_the_next_settled_state() -> None:
    waiting = replace(sandbox(life.PAUSING, generation=2), op_id="op")
    for observed, state in (("paused", life.PAUSED), ("resumed", life.RUNNING)):
        _, row = see(waiting, observed)
        assert (row.state, row.op_id, row.deadline_at) == (state, None, None)


def test_a_time_limit_that_paused_a_sandbox_is_its_cause_while_it_stands() -> None:
    _, paused = see(sandbox("running"), "paused", cause="idle_timeout")
    assert (paused.state, paused.cause) == ("paused", "idle_timeout")
    assert reads.info(paused, None).time_up == "idle_timeout"
    _, again = see(paused, "resumed")
    assert (again.state, again.cause) == ("running", None)
    _, died = see(paused, "failed")
    assert died.cause == "runtime", "what paused it did not end it"
    _, asked = see(sandbox("running"), "paused")
    assert asked.cause is None and reads.info(asked, None).time_up is None
    for cause, time_up in (("deadline", "deadline"), ("oom", None)):
        _, over = see(sandbox("running"), "stopped", cause=cause)
        assert reads.info(over, None).time_up == time_up


def test_one_that_waited_too_long_by_the_look_at_it_hears_when_to_come_again() -> None:
    """As one that was looked at in time does."""
    made = changes(sandbox(life.REQUESTED, cause=decide.WAITING, message="1 node: 1 busy"))
    decide.overdue(made, made.rows[UID], now=1001.0, deadlines=AFTER)
    assert made.rows[UID].state == life.REJECTED
    error = made.rows[UID].error
    assert error is not None
    assert (error.code, error.retry_after_s) == ("capacity_exhausted", decide.RETRY_AFTER_S)
