"""Traces from a seed: rollouts of software engineering agents as they were measured. Pure.

The figures are medians, spreads and shares of public traces of coding agents: calls of a
rollout, pauses in which the model thinks, the mix of calls and of commands, and the few
commands in a hundred that run into a limit. ``scale`` multiplies times and sizes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from sim.chaos.trace import (
    Batch,
    Faults,
    Group,
    JobPause,
    Kind,
    Outcome,
    ProcessKill,
    Rollout,
    Step,
    Target,
    Trace,
    TrainerKill,
    Work,
)

KINDS: Mapping[Kind, float] = {
    "exec": 0.35, "session": 0.15, "read": 0.19, "edit": 0.10, "grep": 0.08, "glob": 0.03,
    "write": 0.01, "noop": 0.09,
}  # fmt: skip
WORKS: Mapping[Work, float] = {"light": 0.40, "python": 0.30, "test": 0.24, "install": 0.06}
RARE: Mapping[Work, float] = {
    "server": 0.02, "hang": 0.01, "flood": 0.005, "binary": 0.005, "forks": 0.002, "oom": 0.001,
}  # fmt: skip
"""Shares of all commands; the rest is spread over ``WORKS``."""
ALONE = ("forks", "oom")
"""Works that take what other commands of the sandbox need: nothing runs beside them."""
OUTCOMES: Sequence[Outcome] = ("fix", "nothing", "fix", "wrong")
OVERLAP = 0.15
HANG_LIMIT_S = 60.0
LONG_S = 5.0
DROPPED = 0.10
"""Share of long commands whose answer is lost."""
KILLED_BATCHES = 0.30
AWAY_S, PAUSE_S = 60.0, 600.0
"""Longest absence of a killed trainer, longest pause of a job."""
TARGETS: Sequence[Target] = ("scheduler", "edge", "auth", "nats", "postgres", "valkey")
FLOOD_BYTES = 50_000_000

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large a run is. ``batches`` trainers of ``groups`` prompts each, with
    ``group_size`` rollouts a prompt; ``calls`` is the median number of calls of a
    rollout, ``most_calls`` the largest."""

    batches: int = 8
    groups: int = 1
    group_size: int = 8
    calls: float = 40.0
    most_calls: int = 200
    tasks: Sequence[str] = ("more-itertools", "sqlparse")


def make(seed: int, *, shape: Shape, scale: float) -> Trace:
    """The trace of a seed: the same one every time."""
    rng = random.Random(seed)
    batches = tuple(_batch(rng, number, shape, scale) for number in range(shape.batches))
    return Trace(seed, scale, batches, _faults(rng, batches, scale))


def _batch(rng: random.Random, number: int, shape: Shape, scale: float) -> Batch:
    name = f"batch-{number}"
    groups = []
    for place in range(shape.groups):
        task = shape.tasks[(number * shape.groups + place) % len(shape.tasks)]
        names = [f"{name}-{place}-{one}" for one in range(shape.group_size)]
        rollouts = tuple(
            Rollout(each, OUTCOMES[one % len(OUTCOMES)], _steps(rng, shape, scale))
            for one, each in enumerate(names)
        )
        groups.append(Group(task, rollouts))
    return Batch(name, tuple(groups))


def _steps(rng: random.Random, shape: Shape, scale: float) -> tuple[Step, ...]:
    count = round(lognormal(rng, shape.calls, 0.7, 5, shape.most_calls))
    steps = [_step(rng, number, scale) for number in range(count)]
    # what must be alone waits for what came before it, and nothing overlaps the last one
    return tuple(
        _alone(step)
        if number + 1 == count or step.work in ALONE or steps[number + 1].work in ALONE
        else step
        for number, step in enumerate(steps)
    )


def _alone(step: Step) -> Step:
    return msgspec.structs.replace(step, overlap=False)


def _step(rng: random.Random, number: int, scale: float) -> Step:
    think_s = lognormal(rng, 3.2, 0.8, 0.9, 140) * scale
    kind = pick(rng, KINDS)
    overlap = rng.random() < OVERLAP
    if kind in ("exec", "session"):
        return _command(rng, number, kind, think_s, overlap, scale)
    size = {"read": 2_385, "edit": 500, "write": 2_063}.get(kind, 0)
    size = round(lognormal(rng, size, 0.9, 1, 64_000)) if size else 0
    return Step(number, kind, round(think_s, 4), overlap, size=size)


def _command(
    rng: random.Random, number: int, kind: Kind, think_s: float, overlap: bool, scale: float
) -> Step:
    rare = RARE if kind == "exec" else {}  # a session outlives only what ends by itself
    work = pick(rng, {**rare, **{w: s * (1 - sum(rare.values())) for w, s in WORKS.items()}})
    seconds, memory_mb = _burn(rng, work)
    dropped = rng.random() < DROPPED
    size = FLOOD_BYTES * scale if work == "flood" else lognormal(rng, 517, 1.2, 1, 30_000)
    return Step(
        number, kind, round(think_s, 4), overlap, work, round(seconds * scale, 4), round(size),
        math.ceil(memory_mb * scale), drop=dropped and seconds > LONG_S,
    )  # fmt: skip


def _burn(rng: random.Random, work: Work) -> tuple[float, float]:
    """Seconds and MB of memory that a command takes, not scaled."""
    if work == "python":
        return rng.uniform(0.1, 1.0), 20
    if work == "test":
        return lognormal(rng, 2.0, 1.3, 0.2, 300), rng.uniform(200, 500)
    if work == "install":
        return lognormal(rng, 7.0, 1.0, 1, 50), 230
    return (HANG_LIMIT_S, 0) if work == "hang" else (rng.uniform(0.02, 0.05), 0)


def _faults(rng: random.Random, batches: Sequence[Batch], scale: float) -> Faults:
    names = [batch.name for batch in batches]
    killed = sorted(rng.sample(names, math.ceil(KILLED_BATCHES * len(names))))
    steps = {batch.name: batch.steps for batch in batches}
    trainers = tuple(
        TrainerKill(name, rng.randrange(1, steps[name]), round(rng.uniform(0, AWAY_S) * scale, 3))
        for name in killed
    )
    live = [name for name in names if name not in killed] or names
    paused = rng.choice(live)
    pause = JobPause(
        paused, rng.randrange(1, max(2, steps[paused] // 2)),
        round(rng.uniform(0.01, 0.1) * PAUSE_S * scale, 3),
    )  # fmt: skip
    each = 1.0 / (len(TARGETS) + 1)
    targets = rng.sample(list(TARGETS), len(TARGETS))
    processes = tuple(
        ProcessKill(target, round(each * (place + rng.uniform(0.5, 1.0)), 4))
        for place, target in enumerate(targets)
    )
    return Faults(trainers, (pause,), processes)


def lognormal(rng: random.Random, median: float, sigma: float, least: float, most: float) -> float:
    """A value of the log-normal distribution, clipped."""
    return min(most, max(least, rng.lognormvariate(math.log(median), sigma)))


def pick(rng: random.Random, shares: Mapping[T, float]) -> T:
    """One key, by its share."""
    return rng.choices(list(shares), weights=list(shares.values()))[0]
