"""The table of transitions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import lifecycle as life


def reachable(state: str) -> set[str]:
    found, todo = set(), [state]
    while todo:
        for t in life.TRANSITIONS:
            if t.source == todo[-1] and t.target not in found:
                found.add(t.target)
                todo.insert(0, t.target)
        todo.pop()
    return found


def test_every_state_is_reached_and_every_life_can_end() -> None:
    assert reachable(life.REQUESTED) | {life.REQUESTED} == set(life.STATES)
    for state in life.STATES:
        if state not in life.TERMINAL:
            assert reachable(state) & life.TERMINAL


def test_an_end_has_no_way_out_and_a_row_has_one_target() -> None:
    assert not [t for t in life.TRANSITIONS if t.source in life.TERMINAL]
    assert len({(t.source, t.event) for t in life.TRANSITIONS}) == len(life.TRANSITIONS)


@pytest.mark.parametrize("state", [s for s in life.STATES if s not in life.TERMINAL])
def test_stop_is_legal_from_every_state_that_is_not_stopping(state: str) -> None:
    """(L06)"""
    target = life.apply(state, "stop")
    if state == life.STOPPING:
        assert target is None
    else:
        assert target == (life.STOPPED if state == life.REQUESTED else life.STOPPING)


@pytest.mark.parametrize("state", sorted(life.ON_NODE))
def test_whatever_has_a_node_can_lose_it(state: str) -> None:
    assert life.apply(state, "lost") == life.LOST


@pytest.mark.parametrize("state", [life.REQUESTED, life.PLACED, life.STARTING])
def test_a_start_can_expire(state: str) -> None:
    assert life.apply(state, "expire") == life.FAILED


@given(
    state=st.sampled_from(life.STATES),
    event=st.sampled_from(sorted(life.EVENTS)),
    generation=st.integers(1, 5),
    seen=st.integers(0, 6),
    placed=st.integers(1, 5),
    same_node=st.booleans(),
)
def test_only_the_present_placement_is_believed(
    state, event, generation, seen, placed, same_node
) -> None:
    target = life.observe(
        state,
        event,
        generation=generation,
        observed_generation=seen,
        placed_generation=placed,
        same_node=same_node,
    )
    if target is None:
        return
    assert same_node
    assert seen >= placed
    assert seen == generation or event in life.FINAL_OBSERVATIONS
    assert target != state
    assert state not in life.TERMINAL
