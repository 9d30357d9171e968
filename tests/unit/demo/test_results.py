"""The table and the verdict of the demonstration."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from demo.results import Rollout, percentile, problems, render, summarise

pytestmark = pytest.mark.unit

GOOD = [
    Rollout("a", True, 10.0, 5, 1.0),
    Rollout("a", False, 20.0, 2, 0.0),
    Rollout("b", True, 30.0, 5, 1.0),
    Rollout("b", False, 40.0, 2, 0.0),
]


def test_percentiles_are_nearest_rank() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 0.50) == 50
    assert percentile(values, 0.99) == 99
    assert percentile([7.0], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_rows_group_by_task() -> None:
    first, second = summarise(GOOD)
    assert (first.task, first.sandboxes, first.execs) == ("a", 2, 7)
    assert (first.oracle_reward, first.idle_reward) == (1.0, 0.0)
    assert (second.create_p50_ms, second.create_p99_ms) == (30.0, 40.0)


def test_infrastructure_failures_are_counted_and_kept_out_of_the_mean() -> None:
    (row,) = summarise([*GOOD[:2], Rollout("a", True, 1.0, 0, None, "node_lost")])
    assert (row.oracle_reward, row.infra_failures) == (1.0, 1)


def test_a_good_run_has_no_problem() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("rollout", "wanted"),
    [
        (Rollout("a", True, 1, 1, 0.0), "with the fix scored 0.0"),
        (Rollout("a", False, 1, 1, 1.0), "without the fix scored 1.0"),
        (Rollout("a", True, 1, 1, None, "edge gone"), "infrastructure failure: edge gone"),
    ],
)
def test_each_deviation_is_a_problem(rollout: Rollout, wanted: str) -> None:
    (problem,) = problems([*GOOD, rollout])
    assert wanted in problem


def test_running_nothing_is_a_problem() -> None:
    assert problems([]) == ["no rollout ran"]


def test_the_table_shows_every_task_and_reward() -> None:
    console = Console(file=io.StringIO(), width=140)
    console.print(render(summarise(GOOD)))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("create p50 ms", "create p99 ms", "execs", "1.00", "0.00", "10.0", "40.0"):
        assert word in text
