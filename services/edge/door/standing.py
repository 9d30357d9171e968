"""Pauses and resumes that a client asks its sandbox's edge for.

Owns: the verbs ``pause`` and ``resume`` at the door. Does not own: how it is done
(:mod:`services.edge.sandbox.pauses`), its turn among other operations (actor), those of jobs,
which the scheduler asks for (handlers).
"""

from __future__ import annotations

import asyncio

from schemas.control import StandingReply, StandingRequest
from services.edge.sandbox.actor import Sandbox
from services.edge.sandbox.pauses import PAUSE_S, Order
from shared.errors import DsecError, Unavailable
from shared.wire import to_wire

TURN_S = 2 * PAUSE_S
"""Longest wait for its turn and its end."""


async def run_pause(sandbox: Sandbox, request: StandingRequest, _op: object) -> StandingReply:
    """The verb ``pause``: answered when it stands still and the journal says so."""
    return await _stand(sandbox, request, "halt")


async def run_resume(sandbox: Sandbox, request: StandingRequest, _op: object) -> StandingReply:
    """The verb ``resume``: answered when it goes on and the journal says so."""
    return await _stand(sandbox, request, "go")


async def _stand(sandbox: Sandbox, request: StandingRequest, order: Order) -> StandingReply:
    await sandbox.found()
    asked = sandbox.asks.ask(order)
    try:  # who asked may leave: it is done all the same
        await sandbox.fate.outlast(asyncio.shield(asked), TURN_S)
    except DsecError as exc:
        failure = to_wire(exc)
        return StandingReply(op_id=request.op_id, state=sandbox.state, failure=failure)
    sandbox.present()  # raises where it has ended meanwhile
    if not asked.done():
        raise Unavailable(f"the sandbox is {sandbox.state}", retry_after_s=0.5)
    return StandingReply(op_id=request.op_id, state=sandbox.state)
