"""The scheduler's values: a sandbox row, a step of its life, what one decision yields.

Pure. Owns no rule: those are in ``decide`` and ``placement``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from schemas.base import WireError, encode
from schemas.sandbox import ItemResult, SandboxEvent, Tightening
from shared import lifecycle
from shared.ids import sandbox_id

MAX_MESSAGE = 1000
"""Longest text of an edge that is kept."""


class Sandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``sandbox`` with what its request adds (``reply_to``, ``total``).

    Times in seconds since the epoch. ``tried`` are nodes that refused it.
    ``op_id``: the client operation that waits for its next settled state.
    """

    uid: str
    project: str
    state: str
    generation: int
    placed_generation: int
    index: int
    spec_idx: int
    principal: str
    backend: str
    cores: float
    memory_mb: int
    expires_at: float
    created_at: float
    changed_at: float
    node: str | None = None
    request_id: str | None = None
    job: str | None = None
    labels: dict[str, str] = {}
    cause: str | None = None
    is_infra: bool = False
    message: str = ""
    error: WireError | None = None
    enforcement: dict[str, str] = {}
    tried: tuple[str, ...] = ()
    op_id: str | None = None
    deadline_at: float | None = None
    running_at: float | None = None
    reply_to: str | None = None
    total: int = 1
    trace: str | None = None

    @property
    def terminal(self) -> bool:
        return self.state in lifecycle.TERMINAL

    @property
    def on_node(self) -> bool:
        """Whether it holds a reservation on ``node``."""
        return self.state in lifecycle.ON_NODE

    @property
    def public_id(self) -> str | None:
        return sandbox_id(self.node, self.uid) if self.node else None


@dataclass(frozen=True, slots=True)
class Step:
    """A row of ``transition``."""

    uid: str
    generation: int
    source: str
    target: str
    event: str
    by: str
    cause: str | None
    at: float


@dataclass(frozen=True, slots=True)
class NodeOp:
    """One operation for an edge: ``verb`` for ``uid`` on ``node``."""

    node: str
    verb: str
    uid: str
    project: str
    generation: int
    cause: str | None = None
    grace_s: float = 0.0
    ttl_running_stop: float | None = None
    deadline_s: float | None = None
    trace: str | None = None
    asked_at: float = 0.0
    tighten: Tightening | None = None


@dataclass(slots=True)
class Changes:
    """What a batch changes, in memory, before it is written as one transaction.

    ``rows`` holds each locked row's newest form, ``was`` its form when locked;
    ``place`` the uids that need a node; ``again`` those whose start is to be sent
    once more. Reservations, op counters and replies follow from ``was`` and
    ``rows`` alone, so that no path can forget them.
    """

    was: dict[str, Sandbox] = field(default_factory=dict)
    rows: dict[str, Sandbox] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    events: list[SandboxEvent] = field(default_factory=list)
    ops: list[NodeOp] = field(default_factory=list)
    place: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)

    def load(self, rows: list[Sandbox]) -> None:
        """Takes locked rows in."""
        for row in rows:
            self.was[row.uid] = self.rows[row.uid] = row

    def changed(self) -> list[Sandbox]:
        """Rows that differ from when they were locked, in uid order."""
        return [r for u, r in sorted(self.rows.items()) if r is not self.was.get(u)]


def event_of(row: Sandbox, at: float) -> SandboxEvent:
    """The announcement of a row's state."""
    return SandboxEvent(
        uid=row.uid,
        project=row.project,
        state=row.state,  # type: ignore[arg-type]
        generation=row.generation,
        at=at,
        id=row.public_id,
        node=row.node,
        backend=row.backend,
        cause=row.cause,
        is_infra=row.is_infra,
        message=row.message,
        job=row.job,
        labels=row.labels,
        request_id=row.request_id,
        index=row.index,
        error=row.error,
    )


def result_of(row: Sandbox) -> ItemResult:
    """A row as an item of a reply."""
    return ItemResult(
        index=row.index,
        uid=row.uid,
        state=row.state,  # type: ignore[arg-type]
        id=row.public_id,
        node=row.node,
        error=row.error,
    )


def json_text(value: object) -> str:
    """JSON for a ``jsonb`` parameter. Postgres cannot hold NUL in it."""
    return encode(value).decode().replace("\\u0000", "\\ufffd")
