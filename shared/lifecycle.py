"""The life of a sandbox as one table of transitions. Pure.

Owns: states, who may cause which transition, causes, and how an observation that
arrives late is judged. Does not own: storing (services/scheduler) or doing
(services/edge).

``generation`` is the number of the scheduler's last *command* for a sandbox
(place, stop, pause, resume). An edge repeats in its observations the generation
it acted on, which is how a late answer is told from a current one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

REQUESTED, PLACED, STARTING, RUNNING = "requested", "placed", "starting", "running"
PAUSING, PAUSED, RESUMING = "pausing", "paused", "resuming"
STOPPING, STOPPED = "stopping", "stopped"
FAILED, REJECTED, LOST = "failed", "rejected", "lost"

STATES = (
    REQUESTED, PLACED, STARTING, RUNNING, PAUSING, PAUSED, RESUMING,
    STOPPING, STOPPED, FAILED, REJECTED, LOST,
)  # fmt: skip
TERMINAL = frozenset({STOPPED, FAILED, REJECTED, LOST})
ON_NODE = frozenset({PLACED, STARTING, RUNNING, PAUSING, PAUSED, RESUMING, STOPPING})
"""States that hold a reservation on a node."""
TRANSITIONAL = frozenset({PAUSING, RESUMING, STOPPING})
"""States that wait for an edge's answer to an operation: they have deadlines."""
PUBLISHED = frozenset({RUNNING, PAUSED, *TERMINAL})
"""States that are announced as events."""

CAUSES: dict[str, bool] = {
    "completed": False,
    "idle_timeout": False,
    "deadline": False,
    "oom": False,
    "disk_quota": False,
    "pids_limit": False,
    "output_limit": False,
    "policy_violation": False,
    "cancelled": False,
    "job_lost": False,
    "quota": False,
    "invalid": False,
    "image": True,
    "node_lost": True,
    "runtime": True,
    "capacity": True,
    "start_timeout": True,
    "internal": True,
}
"""Cause of a terminal state → whether it is infrastructure's fault."""


TIME_LIMITS = frozenset({"idle_timeout", "deadline"})
"""Causes that say that a sandbox's time was up; a paused one has such a cause, too, where that
paused it."""


@dataclass(frozen=True, slots=True)
class Transition:
    """``source`` --event--> ``target``, decided by ``by``."""

    source: str
    event: str
    target: str
    by: str


def _rows() -> Iterator[Transition]:
    t = Transition
    yield t(REQUESTED, "place", PLACED, "scheduler")
    yield t(REQUESTED, "reject", REJECTED, "auth or scheduler")
    yield t(REQUESTED, "stop", STOPPED, "client")
    for source in (REQUESTED, PLACED, STARTING):
        yield t(source, "expire", FAILED, "reconciler")
    for source in (PLACED, STARTING):
        yield t(source, "starting", STARTING, "edge")
        yield t(source, "running", RUNNING, "edge")
        yield t(source, "refused", REQUESTED, "edge")
    for source in (PLACED, STARTING, RUNNING, PAUSING, PAUSED, RESUMING, STOPPING):
        if source != STOPPING:
            yield t(source, "stop", STOPPING, "client")
        yield t(source, "failed", FAILED if source != STOPPING else STOPPED, "edge")
        yield t(source, "stopped", STOPPED, "edge")
        yield t(source, "unknown", LOST if source != STOPPING else STOPPED, "edge")
        yield t(source, "lost", LOST, "watcher")
    # a node that refuses what it was also told to stop has nothing of it
    yield t(STOPPING, "refused", STOPPED, "edge")
    yield t(RUNNING, "pause", PAUSING, "client or reconciler")
    yield t(RUNNING, "paused", PAUSED, "edge")
    yield t(PAUSING, "paused", PAUSED, "edge")
    yield t(PAUSING, "resumed", RUNNING, "edge")
    yield t(PAUSED, "resume", RESUMING, "client or reconciler")
    yield t(PAUSED, "resumed", RUNNING, "edge")
    yield t(RESUMING, "resumed", RUNNING, "edge")
    yield t(RESUMING, "paused", PAUSED, "edge")
    # the edge does both in turn; what it says of the first is of an older command
    yield t(PAUSING, "resume", RESUMING, "client or reconciler")
    yield t(RESUMING, "pause", PAUSING, "client or reconciler")


TRANSITIONS: tuple[Transition, ...] = tuple(_rows())
_TABLE = {(t.source, t.event): t for t in TRANSITIONS}
EVENTS = frozenset(t.event for t in TRANSITIONS)
FINAL_OBSERVATIONS = frozenset({"stopped", "failed", "unknown"})


def apply(state: str, event: str) -> str | None:
    """The state after ``event``, or ``None`` where it has no meaning there."""
    transition = _TABLE.get((state, event))
    return transition.target if transition else None


def is_infra(cause: str | None) -> bool:
    """Whether a sample that ended by ``cause`` is to be masked."""
    return CAUSES.get(cause or "", False)


def observe(
    state: str,
    event: str,
    *,
    generation: int,
    observed_generation: int,
    placed_generation: int,
    same_node: bool,
) -> str | None:
    """The state after an edge's observation, ``None`` where it changes nothing.

    An observation of another node, or from before the present placement, is about
    a sandbox that is no longer meant. One of the present placement but from before
    the last command counts only if it says that the sandbox is gone.
    """
    if not same_node or observed_generation < placed_generation:
        return None
    if observed_generation != generation and event not in FINAL_OBSERVATIONS:
        return None
    target = apply(state, event)
    return None if target == state else target
