"""What the rollouts came to, as a table and as a verdict. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True, slots=True)
class Rollout:
    """One finished rollout. ``reward`` is ``None`` when the infrastructure failed it
    (``infra_error`` says how): such a rollout says nothing about the policy."""

    task: str
    oracle: bool
    create_ms: float
    execs: int
    reward: float | None
    infra_error: str = ""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One line of the table; rewards are means, ``None`` where there were none."""

    task: str
    sandboxes: int
    create_p50_ms: float
    create_p99_ms: float
    execs: int
    oracle_reward: float | None
    idle_reward: float | None
    infra_failures: int


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile, ``share`` in (0, 1]. NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summarise(rollouts: Iterable[Rollout]) -> list[TaskRow]:
    """One row a task, in order of first appearance."""
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.task, []).append(rollout)
    return [_row(task, group) for task, group in groups.items()]


def _row(task: str, group: Sequence[Rollout]) -> TaskRow:
    creates = [rollout.create_ms for rollout in group if not math.isnan(rollout.create_ms)]
    return TaskRow(
        task=task,
        sandboxes=len(group),
        create_p50_ms=percentile(creates, 0.50),
        create_p99_ms=percentile(creates, 0.99),
        execs=sum(rollout.execs for rollout in group),
        oracle_reward=_mean_reward(rollout for rollout in group if rollout.oracle),
        idle_reward=_mean_reward(rollout for rollout in group if not rollout.oracle),
        infra_failures=sum(rollout.reward is None for rollout in group),
    )


def _mean_reward(rollouts: Iterable[Rollout]) -> float | None:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None


def problems(rollouts: Sequence[Rollout]) -> list[str]:
    """Why the demonstration failed, a sentence each; empty when every sandbox with the
    fix scored 1, every one without scored 0, and the infrastructure failed none."""
    found = [] if rollouts else ["no rollout ran"]
    for rollout in rollouts:
        kind = "with the fix" if rollout.oracle else "without the fix"
        wanted = 1.0 if rollout.oracle else 0.0
        if rollout.reward is None:
            found.append(f"{rollout.task}: infrastructure failure: {rollout.infra_error}")
        elif rollout.reward != wanted:
            found.append(f"{rollout.task}: {kind} scored {rollout.reward}, not {wanted}")
    return found


def render(rows: Iterable[TaskRow]) -> Table:
    """The closing table."""
    table = Table(title="Rollouts")
    table.add_column("task")
    for column in (
        "sandboxes", "create p50 ms", "create p99 ms", "execs",
        "reward with fix", "reward without", "infra failures",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.task,
            str(row.sandboxes),
            f"{row.create_p50_ms:.1f}",
            f"{row.create_p99_ms:.1f}",
            str(row.execs),
            _reward_text(row.oracle_reward),
            _reward_text(row.idle_reward),
            str(row.infra_failures),
        )
    return table


def _reward_text(reward: float | None) -> str:
    return "–" if reward is None else f"{reward:.2f}"
