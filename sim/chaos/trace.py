"""What a chaos run does, as data: rollouts step by step, and the faults that meet them.

Owns: the form of the trace and its JSON. Does not own: making one
(:mod:`sim.chaos.workload`) or running it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

VERSION = 1
Kind = Literal["exec", "session", "read", "edit", "write", "grep", "glob", "noop"]
Work = Literal[
    "light", "python", "test", "install", "hang", "flood", "binary", "forks", "oom", "server"
]
Outcome = Literal["fix", "nothing", "wrong"]
Target = Literal["edge", "scheduler", "auth", "nats", "postgres", "valkey"]

MUTATING = ("exec", "session")
"""Steps that must happen once: each appends its number to a file in the sandbox."""


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of the agent. ``think_s`` passes before it; ``overlap``: the next one does
    not wait for it. ``work`` and ``seconds`` are a command's, ``size`` its output, or what
    is written, in bytes; ``memory_mb`` what it fills. ``drop``: its answer is lost."""

    number: int
    kind: Kind
    think_s: float = 0.0
    overlap: bool = False
    work: Work | None = None
    seconds: float = 0.0
    size: int = 0
    memory_mb: int = 0
    drop: bool = False


class Rollout(msgspec.Struct, frozen=True):
    """One rollout: what its agent does, and what it hands in at the end."""

    name: str
    outcome: Outcome
    steps: tuple[Step, ...]


class Group(msgspec.Struct, frozen=True):
    """Rollouts of one prompt: same task, same image."""

    task: str
    rollouts: tuple[Rollout, ...]


class Batch(msgspec.Struct, frozen=True):
    """What one trainer process does, as one job."""

    name: str
    groups: tuple[Group, ...]

    @property
    def steps(self) -> int:
        """Steps of all its rollouts."""
        return sum(len(r.steps) for g in self.groups for r in g.rollouts)


class TrainerKill(msgspec.Struct, frozen=True):
    """The trainer of ``batch`` is killed after ``step`` steps of its rollouts, and comes
    back ``away_s`` later."""

    batch: str
    step: int
    away_s: float


class JobPause(msgspec.Struct, frozen=True):
    """The job of ``batch`` is paused after ``step`` steps, for ``seconds``."""

    batch: str
    step: int
    seconds: float


class ProcessKill(msgspec.Struct, frozen=True):
    """A process of the system is killed when this share of all steps is done."""

    target: Target
    share: float


class Faults(msgspec.Struct, frozen=True):
    """All faults of a run."""

    trainers: tuple[TrainerKill, ...] = ()
    pauses: tuple[JobPause, ...] = ()
    processes: tuple[ProcessKill, ...] = ()


class Trace(msgspec.Struct, frozen=True):
    """A whole run. ``scale`` shortened its waits, burns and sizes."""

    seed: int
    scale: float
    batches: tuple[Batch, ...]
    faults: Faults
    version: int = VERSION

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, in order."""
        return [r for b in self.batches for g in b.groups for r in g.rollouts]

    @property
    def steps(self) -> int:
        """Steps of all rollouts."""
        return sum(b.steps for b in self.batches)


def load(path: Path) -> Trace:
    """A trace from its file. Raises ``ValueError`` for what is none."""
    try:
        trace = msgspec.json.decode(path.read_bytes(), type=Trace)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path} is no trace: {exc}") from exc
    if trace.version != VERSION:
        raise ValueError(f"{path} is a trace of version {trace.version}, not {VERSION}")
    return trace


def save(trace: Trace, path: Path) -> None:
    """Writes a trace to its file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(trace), indent=1) + b"\n")
