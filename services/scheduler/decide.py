"""What placement, an observation or time does to a sandbox. Pure.

Owns: judgement by :mod:`shared.lifecycle`, causes, errors, deadlines, what is asked
of edges. Does not own: the choice of nodes (``placement``), operations of clients
(``operating``), rows in the database, the clock (times are given).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from schemas.base import WireError
from schemas.sandbox import CreateCommand, Observation
from services.scheduler.model import MAX_MESSAGE, Changes, NodeOp, Sandbox, Step, event_of
from services.scheduler.placement import Failure
from shared import lifecycle as life

WAITING = "capacity"
"""The cause of a requested sandbox that waits for a node to have room."""
MARGIN_S, MARGIN = 1.0, 0.1
"""A create that waits is refused so long (or such a share of its time) before its
client stops waiting."""
RETRY_AFTER_S = 5.0
"""The hint to a client where placement gave none."""
MAX_DOUBLINGS = 3

ALIVE = frozenset({"starting", "running", "paused", "resumed"})
"""Observations of a sandbox that uses its node."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long an edge may take before it is asked again, in seconds."""

    start_again_s: float = 5.0
    op_again_s: float = 5.0
    missing_s: float = 10.0
    attempts: int = 4
    again_s: float = 1.0
    """Between attempts at nodes that refused for want of capacity, doubled up to
    ``MAX_DOUBLINGS`` times."""


def advance(
    changes: Changes, row: Sandbox, event: str, *, at: float, by: str, **new: Any
) -> Sandbox:
    """Applies ``event`` to ``row`` with the new values; records step and event.
    The event must be legal (``lifecycle.apply``)."""
    target = life.apply(row.state, event)
    if target is None:
        raise ValueError(f"{event} has no meaning in {row.state}")
    if target not in life.TRANSITIONAL:
        new.setdefault("op_id", None)
        new.setdefault("deadline_at", None)
    if target == life.RUNNING and row.running_at is None:
        new["running_at"] = at
    after = replace(row, state=target, changed_at=at, **new)
    if after.terminal:
        after = _ended(after)
    changes.rows[row.uid] = after
    step = Step(row.uid, after.generation, row.state, target, event, by, after.cause, at)
    changes.steps.append(step)
    if target in life.PUBLISHED:
        changes.events.append(event_of(after, at))
    return after


def _ended(row: Sandbox) -> Sandbox:
    infra = life.is_infra(row.cause)
    error = row.error
    if error is None and (row.running_at is None or row.state in (life.FAILED, life.LOST)):
        text = row.message or f"the sandbox {row.state} ({row.cause})"
        code = "deadline_exceeded" if row.cause == "start_timeout" else "sandbox_died"
        retryable = code == "deadline_exceeded"
        error = WireError(
            code=code, message=text, cause=row.cause, is_infra=infra, retryable=retryable
        )
    return replace(row, is_infra=infra, error=error)


def reject(changes: Changes, row: Sandbox, error: WireError, *, at: float) -> None:
    """Ends a sandbox that has no node."""
    known = error.cause if error.cause in life.CAUSES else None
    cause = known or _CAUSE_OF_CODE.get(error.code, "invalid")
    message = error.message[:MAX_MESSAGE]
    advance(
        changes, row, "reject", at=at, by="scheduler", cause=cause, message=message, error=error
    )


def unplaced(
    changes: Changes, row: Sandbox, failure: Failure, *, at: float, deadlines: Deadlines
) -> None:
    """What becomes of a sandbox that placement found no node for: it waits in the
    queue where one may take it later, until shortly before its deadline. Where nodes
    refused it, what they said is the better reason."""
    error = failure.error
    if failure.refused:
        error = exhausted(row, row.error, error.retry_after_s)
    if not failure.hope or error.code != "capacity_exhausted" or at >= patience(row):
        reject(changes, row, error, at=at)
    elif row.tried and _full(row.error):
        _try_again(changes, row, error.message, at=at, deadlines=deadlines)
    else:
        after = replace(
            row, cause=WAITING, error=None, message=error.message[:MAX_MESSAGE],
            deadline_at=patience(row),
        )  # fmt: skip
        if after != row:  # a row that waits on is not written again
            changes.rows[row.uid] = after


def patience(row: Sandbox) -> float:
    """When a sandbox that has no node yet is refused."""
    return row.expires_at - min(MARGIN_S, MARGIN * (row.expires_at - row.created_at))


def waits(row: Sandbox) -> bool:
    """Whether it is in the queue for room."""
    return row.state == life.REQUESTED and row.cause == WAITING


def may_wait(row: Sandbox, now: float) -> bool:
    """Whether it is in the queue and has time left there."""
    return waits(row) and now < patience(row)


def _full(error: WireError | None) -> bool:
    return error is None or error.code == "capacity_exhausted"


def _try_again(
    changes: Changes, row: Sandbox, message: str, *, at: float, deadlines: Deadlines
) -> None:
    """All nodes may be asked again in a while: what they were out of comes back."""
    pause_s = deadlines.again_s * 2 ** min(max(row.generation - 1, 0), MAX_DOUBLINGS)
    changes.rows[row.uid] = replace(
        row, tried=(), error=None, message=message[:MAX_MESSAGE],
        deadline_at=min(at + pause_s, patience(row)),
    )  # fmt: skip


_CAUSE_OF_CODE = {
    "capacity_exhausted": "capacity",
    "quota_exceeded": "quota",
    "policy_denied": "policy_violation",
    "unavailable": "internal",
    "internal": "internal",
    "not_found": "image",
}


def later(changes: Changes, row: Sandbox, *, at: float) -> None:
    """Leaves a requested sandbox to the reconciler, at ``at``."""
    changes.rows[row.uid] = replace(row, deadline_at=min(at, row.expires_at))


def adopted(stop: Sandbox, created: Sandbox) -> Sandbox:
    """A create that came after its stop: the sandbox is over."""
    text = "stopped before it was created"
    error = WireError(code="sandbox_died", message=text, cause="cancelled")
    return replace(
        created, state=life.STOPPED, cause="cancelled", message=text, error=error,
        created_at=stop.created_at, changed_at=stop.changed_at,
    )  # fmt: skip


def with_reply(row: Sandbox, command: CreateCommand) -> Sandbox:
    """A stored row, to be answered where its repeated command says."""
    return replace(row, reply_to=command.reply_to, total=command.total)


def only_reply(row: Sandbox, error: WireError) -> Sandbox:
    """A row that is never stored: only an answer is made of it."""
    return replace(row, state=life.REJECTED, error=error)


def place(changes: Changes, row: Sandbox, node: str, *, at: float, deadlines: Deadlines) -> Sandbox:
    """Gives a requested sandbox its node, under a new generation."""
    generation = row.generation + 1
    return advance(
        changes, row, "place", at=at, by="scheduler",
        node=node, generation=generation, placed_generation=generation,
        deadline_at=min(row.expires_at, at + deadlines.start_again_s),
        message="", error=None, cause=None,
    )  # fmt: skip


def observed(
    changes: Changes, node: str, seen: Observation, *, now: float, deadlines: Deadlines
) -> None:
    """Judges one observation of ``node`` against the row in ``changes``."""
    row = changes.rows.get(seen.uid)
    if row is None:
        _stop_stray(changes, node, seen, "unknown")
        return
    same_node = row.node == node
    target = life.observe(
        row.state,
        seen.observed,
        generation=row.generation,
        observed_generation=seen.generation,
        placed_generation=row.placed_generation,
        same_node=same_node,
    )
    if target is None:
        if (row.terminal or not same_node) and seen.observed in ALIVE:
            _stop_stray(changes, node, seen, row.project)
        elif row.deadline_at is not None and row.state in (life.RUNNING, life.PAUSED):
            changes.rows[row.uid] = replace(row, deadline_at=None)  # not missing after all
        return
    at = min(seen.at, now)  # an edge's clock may run ahead
    new: dict[str, Any] = {"message": seen.message[:MAX_MESSAGE], "error": seen.error}
    if seen.enforcement:
        new["enforcement"] = seen.enforcement
    if target == life.REQUESTED:
        _refused(changes, row, seen, at=at, deadlines=deadlines)
        return
    if target in life.TERMINAL:
        new["cause"] = _cause(row, seen)
    elif target == life.STARTING:
        new["deadline_at"] = row.expires_at
    else:  # it stands still because its time was up, or goes on
        new["cause"] = seen.cause if seen.cause in life.TIME_LIMITS else None
    advance(changes, row, seen.observed, at=at, by=node, **new)


def _cause(row: Sandbox, seen: Observation) -> str:
    """Why it ended: as the edge says, else as the stop said."""
    if seen.cause in life.CAUSES:
        return str(seen.cause)
    if row.cause and row.state not in (life.PAUSED, life.RESUMING):
        return row.cause
    return {"stopped": "completed", "unknown": "node_lost"}.get(seen.observed, "runtime")


def _stop_stray(changes: Changes, node: str, seen: Observation, project: str) -> None:
    if seen.observed in ALIVE:
        changes.ops.append(
            NodeOp(node, "stop", seen.uid, project, seen.generation + 1, cause="cancelled")
        )


def _refused(
    changes: Changes, row: Sandbox, seen: Observation, *, at: float, deadlines: Deadlines
) -> None:
    node = row.node or ""
    after = advance(
        changes, row, "refused", at=at, by=node,
        node=None, tried=(*row.tried, node), message=seen.message[:MAX_MESSAGE],
        error=seen.error,
    )  # fmt: skip
    if at >= after.expires_at:
        expire(changes, after, at=at)
    elif len(after.tried) >= deadlines.attempts:
        error = exhausted(after, seen.error)
        if error.code == "capacity_exhausted" and at < patience(after):
            _try_again(changes, after, error.message, at=at, deadlines=deadlines)
        else:
            reject(changes, after, error, at=at)
    else:
        changes.place.append(row.uid)


def exhausted(
    row: Sandbox, last: WireError | None, retry_after_s: float | None = RETRY_AFTER_S
) -> WireError:
    """The error of a sandbox that every tried node refused."""
    if last is not None and last.code in ("unsupported", "policy_denied", "invalid_request"):
        return last
    why = f": {last.message}" if last else f": {row.message}" if row.message else ""
    full = _full(last)
    return WireError(
        code="capacity_exhausted" if full else "unavailable",
        message=f"refused by {', '.join(row.tried)}{why}",
        cause="capacity" if full or last is None else last.cause,
        is_infra=True,
        retryable=True,
        retry_after_s=retry_after_s,
    )


def expire(changes: Changes, row: Sandbox, *, at: float) -> None:
    """Ends a start that took too long; its node is told to drop it."""
    message = row.message or f"not running in time (state {row.state})"
    after = advance(
        changes, row, "expire", at=at, by="reconciler",
        cause="start_timeout", message=message, generation=row.generation + 1,
    )  # fmt: skip
    if after.node:
        changes.ops.append(node_op(after, "stop"))


def lost(changes: Changes, row: Sandbox, *, at: float, message: str) -> None:
    """Ends a sandbox whose node is gone; should the node come back, it is told."""
    after = advance(
        changes, row, "lost", at=at, by="watcher",
        cause="node_lost", message=message, generation=row.generation + 1,
    )  # fmt: skip
    changes.ops.append(node_op(after, "stop"))


def stop(
    changes: Changes, row: Sandbox, *, at: float, by: str, cause: str, deadlines: Deadlines,
    grace_s: float = 0.0, op_id: str | None = None, message: str = "", trace: str | None = None,
) -> None:  # fmt: skip
    """Stops a sandbox in any state that is not its end."""
    generation = row.generation + 1
    new: dict[str, Any] = {"cause": cause, "message": message, "generation": generation}
    if row.on_node:
        new |= {"op_id": op_id, "deadline_at": at + grace_s + deadlines.op_again_s}
    after = advance(changes, row, "stop", at=at, by=by, **new)
    if after.node and not after.terminal:
        changes.ops.append(node_op(after, "stop", grace_s=grace_s, trace=trace))


def node_op(row: Sandbox, verb: str, **kw: Any) -> NodeOp:
    """An operation on a sandbox for the node that has it."""
    return NodeOp(row.node or "", verb, row.uid, row.project, row.generation, cause=row.cause, **kw)


def ask(
    changes: Changes, row: Sandbox, verb: str, *, at: float, by: str, deadlines: Deadlines,
    op_id: str | None = None, trace: str | None = None,
) -> None:  # fmt: skip
    """Asks the sandbox's node to pause or resume it; that must be legal."""
    after = advance(
        changes, row, verb, at=at, by=by, generation=row.generation + 1, op_id=op_id,
        deadline_at=at + deadlines.op_again_s,
    )  # fmt: skip
    changes.ops.append(node_op(after, verb, trace=trace))


def overdue(changes: Changes, row: Sandbox, *, now: float, deadlines: Deadlines) -> None:
    """What to do with a row whose ``deadline_at`` has passed."""
    if waits(row) and now >= row.expires_at:
        reject(changes, row, _no_room(row), at=now)
    elif row.state in (life.REQUESTED, life.PLACED, life.STARTING) and now >= row.expires_at:
        expire(changes, row, at=now)
    elif row.state == life.REQUESTED:
        changes.place.append(row.uid)
    elif row.state == life.PLACED:
        changes.again.append(row.uid)
        again = min(row.expires_at, now + deadlines.start_again_s)
        changes.rows[row.uid] = replace(row, deadline_at=again)
    elif row.state in _ASKED:
        changes.ops.append(node_op(row, _ASKED[row.state]))
        changes.rows[row.uid] = replace(row, deadline_at=now + deadlines.op_again_s)
    elif row.state in (life.RUNNING, life.PAUSED):
        lost(changes, row, at=now, message="the node started again without the sandbox")
    else:
        later = row.expires_at if row.state == life.STARTING else None
        changes.rows[row.uid] = replace(row, deadline_at=later)


def _no_room(row: Sandbox) -> WireError:
    return WireError(
        code="capacity_exhausted", message=row.message, cause=WAITING, is_infra=True,
        retryable=True, retry_after_s=RETRY_AFTER_S,
    )  # fmt: skip


_ASKED = {life.PAUSING: "pause", life.RESUMING: "resume", life.STOPPING: "stop"}
