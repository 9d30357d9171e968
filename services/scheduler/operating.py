"""What an operation of a client does to a sandbox: stop, pause, resume, set_timeout,
tighten. Pure.

Owns: what each means in each state. Does not own: transitions and stops in general
(``decide``), the selection of sandboxes (``ops``).
"""

from __future__ import annotations

from msgspec.structs import replace

from schemas.base import WireError
from schemas.sandbox import ItemResult, OpCommand
from services.scheduler import decide
from services.scheduler.model import Changes, Sandbox
from shared import lifecycle as life


def operate(
    changes: Changes, uid: str, command: OpCommand, *, at: float, deadlines: decide.Deadlines
) -> ItemResult | None:
    """Applies a client's operation to one sandbox. Returns its result where that is
    an error known at once, else ``None``: then the row tells, now or later."""
    row = changes.rows.get(uid)
    if row is None or row.project != command.project or row.request_id is None:
        return _refusal(uid, 0, "stopped", "not_found", f"no sandbox {uid} in {command.project}")
    if command.verb == "stop":
        _client_stop(changes, row, command, at=at, deadlines=deadlines)
        return None
    if command.verb == "set_timeout":
        return _set_timeout(changes, row, command)
    if command.verb == "tighten":
        return _tighten(changes, row, command)
    return _pause_resume(changes, row, command, at=at, deadlines=deadlines)


def _client_stop(
    changes: Changes, row: Sandbox, command: OpCommand, *, at: float, deadlines: decide.Deadlines
) -> None:
    request = command.request
    if row.terminal:
        return
    if row.state == life.STOPPING:  # asked again, perhaps with less patience
        waiting = changes.rows[row.uid] = replace(row, op_id=request.request_id)
        op = decide.node_op(waiting, "stop", grace_s=request.grace_s, trace=command.trace)
        changes.ops.append(op)
        return
    ran = row.running_at is not None
    cause = request.cause if request.cause in life.CAUSES else "completed" if ran else "cancelled"
    decide.stop(
        changes, row, at=at, by="client", cause=str(cause), deadlines=deadlines,
        grace_s=request.grace_s, op_id=request.request_id, trace=command.trace,
    )  # fmt: skip


def _set_timeout(changes: Changes, row: Sandbox, command: OpCommand) -> ItemResult | None:
    request = command.request
    if row.terminal or row.state == life.STOPPING:
        return _conflict(row, command.verb)
    if row.node:
        changes.ops.append(
            decide.node_op(
                row,
                "set_timeout",
                ttl_running_stop=request.ttl_running_stop,
                deadline_s=request.deadline_s,
                trace=command.trace,
                asked_at=command.asked_at,
            )
        )
    return None


def _tighten(changes: Changes, row: Sandbox, command: OpCommand) -> ItemResult | None:
    if row.terminal or not row.node:
        return _conflict(row, command.verb)
    changes.ops.append(
        decide.node_op(row, "tighten", tighten=command.request.tighten, trace=command.trace)
    )
    return None


def _pause_resume(
    changes: Changes, row: Sandbox, command: OpCommand, *, at: float, deadlines: decide.Deadlines
) -> ItemResult | None:
    verb = command.verb
    op_id = command.request.request_id
    done, going = (life.PAUSED, life.PAUSING) if verb == "pause" else (life.RUNNING, life.RESUMING)
    if row.state == done:
        # its client may have had the opposite done at the node, and we not have heard of it
        again = changes.rows[row.uid] = replace(row, generation=row.generation + 1)
        changes.ops.append(decide.node_op(again, verb, trace=command.trace))
        return None
    if row.state == going:
        changes.rows[row.uid] = replace(row, op_id=op_id)
        return None
    if life.apply(row.state, verb) is None:
        return _conflict(row, verb)
    decide.ask(
        changes, row, verb, at=at, by="client", deadlines=deadlines, op_id=op_id,
        trace=command.trace,
    )  # fmt: skip
    return None


def unanswered(result: ItemResult) -> ItemResult:
    """What a client hears of a sandbox whose node is silent. The operation stands: it
    is carried out when the node is back, or the sandbox is lost with its node."""
    if result.error is not None or result.state not in life.TRANSITIONAL:
        return result
    text = f"{result.state}: node {result.node} is silent; it is done when the node is back"
    error = WireError(code="unavailable", message=text, is_infra=True, retryable=True)
    return replace(result, error=error)


def _conflict(row: Sandbox, verb: str) -> ItemResult:
    message = f"{verb}: the sandbox is {row.state}"
    return _refusal(row.uid, row.index, row.state, "conflict", message)


def _refusal(uid: str, index: int, state: str, code: str, message: str) -> ItemResult:
    error = WireError(code=code, message=message)
    return ItemResult(index=index, uid=uid, state=state, error=error)  # type: ignore[arg-type]
