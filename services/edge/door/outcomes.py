"""What an operation's end is to its client, and to whoever asks again.

Owns: typed errors of ends, the reply that is kept. Does not own: sending it (door).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from schemas.base import encode
from schemas.exec import ExecReply, FileReply
from services.edge.door.operation import Operation
from services.edge.door.verbs import Verb
from services.edge.journal.records import ExecRow
from services.edge.sandbox.actor import Sandbox
from shared import lifecycle
from shared.errors import CapacityExhausted, DsecError, Internal, SandboxDied, Unavailable

RETRY_AFTER_S = 0.5
COUNTED = ("ended", "repeated", "failed_infra", "unknown")
"""Of the operations at a door: which the client asked again, the infrastructure failed,
and nobody knows the outcome of."""


def death(error: SandboxDied, sandbox: Sandbox) -> DsecError:
    """What the command saw, named by what the edge knows of the sandbox's end."""
    if sandbox.ending is not None:
        return sandbox.ending.death()
    if error.cause is not None:
        error.is_infra = lifecycle.is_infra(error.cause)
    return error


def ending() -> Unavailable:
    """The edge ends: whoever asks again finds the next one."""
    return Unavailable("the edge is ending", retry_after_s=RETRY_AFTER_S)


def full(text: str) -> Unavailable:
    """The error of an operation that finds no room at the door."""
    return Unavailable(f"the door is full: {text}", retry_after_s=RETRY_AFTER_S)


def unknown(text: str) -> Internal:
    """The error of an operation that may have run, or not, or half."""
    details = {"outcome": "unknown"}
    return Internal(f"{text}: its outcome is unknown", cause="runtime", details=details)


def did_not_begin(error: DsecError | None) -> bool:
    """Whether the same operation may be tried again."""
    return error is not None and isinstance(error, (Unavailable, CapacityExhausted))


def count(counts: Counter[str], op: Operation, error: DsecError | None) -> None:
    """How it came and ended."""
    counts["ended"] += 1
    counts["repeated"] += op.again
    counts["failed_infra"] += error is not None and error.is_infra
    counts["unknown"] += error is not None and error.details.get("outcome") == "unknown"


async def repeated(row: ExecRow, op: Operation, sandbox: Sandbox, verb: Verb, request: Any) -> Any:
    """The answer to an operation that is in the journal: its reply, or that of the
    command that goes on in the sandbox."""
    if row.reply is not None:
        return msgspec.json.decode(row.reply, type=verb.reply)
    reply = await verb.resume(sandbox, request, op) if verb.resume else None
    if reply is None:
        raise unknown("the edge restarted while this operation ran")
    return reply


def recorded(op: Operation, reply: Any, final: bytes) -> bytes:
    """What is kept and answered to a repetition: output that went out in frames as far as
    the trajectory log keeps it, what it does not keep counts as dropped."""
    if not (op.streamed["o"] or op.streamed["e"]):
        return final
    out, err = op.logged.kept("stdout"), op.logged.kept("stderr")
    missing = op.streamed["o"] - len(out), op.streamed["e"] - len(err)
    if isinstance(reply, ExecReply):
        dropped = reply.truncated[0] + max(missing[0], 0), reply.truncated[1] + max(missing[1], 0)
        kept = msgspec.structs.replace(
            reply, stdout=out, stderr=err, truncated=dropped, whole=op.logged.whole
        )
        return encode(kept)
    if isinstance(reply, FileReply) and reply.error is None and missing[0] == 0:
        return encode(msgspec.structs.replace(reply, data=out))
    return final
