"""What the end of an operation means. Pure.

Owns: which errors say that nothing ran, what a death inside a command is called, what a
repetition will be answered. Does not own: telling anybody (:mod:`services.edge.door`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.base import encode
from schemas.exec import ExecReply
from services.edge.actor import Sandbox
from services.edge.operation import Operation
from shared import lifecycle
from shared.errors import CapacityExhausted, DsecError, SandboxDied, Unavailable


def death(error: SandboxDied, sandbox: Sandbox) -> DsecError:
    """What the command saw, named by what the edge knows of the sandbox's end."""
    if sandbox.ending is not None:
        return sandbox.ending.death()
    if error.cause is not None:
        error.is_infra = lifecycle.is_infra(error.cause)
    return error


def did_not_begin(error: DsecError | None) -> bool:
    """Whether the same operation may be tried again."""
    return isinstance(error, Unavailable | CapacityExhausted)


def recorded(op: Operation, reply: Any, final: bytes) -> bytes:
    """What a later repetition answers: output that went out in frames is not kept, so
    it counts as dropped there."""
    if not isinstance(reply, ExecReply) or not any(op.streamed.values()):
        return final
    dropped = (reply.truncated[0] + op.streamed["o"], reply.truncated[1] + op.streamed["e"])
    return encode(msgspec.structs.replace(reply, truncated=dropped))
