"""What is done when a sandbox's time is up, and for those who judge its work then.

Owns: the order of it: looked at again, its commands asked, paused, cleared for a verifier
or ended; the verb ``verify``. Does not own: what is due
(:mod:`services.edge.sandbox.rules`), who is let in
(:mod:`services.edge.sandbox.verifying`).

A sandbox is cleared before its journal says so: an edge that dies in between does it again,
and no verifier was let in yet.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from schemas.control import LeaseReply, LeaseRequest, PolicyRequest
from services.edge.drivers.base import Handle, Resumable
from services.edge.drivers.clearing import Clearing
from services.edge.drivers.offers import offered
from services.edge.sandbox import rules
from services.edge.sandbox.ending import Ending
from shared.errors import Conflict, DsecError, Unavailable, Unsupported

if TYPE_CHECKING:
    from services.edge.sandbox.actor import Sandbox

log = logging.getLogger(__name__)

LOOK_S = 5.0
"""Longest question whether commands run in a sandbox that seems idle."""
CLEAR_S = 30.0
"""Longest wait for operations that were cut short, and for processes that were killed."""


async def act(sandbox: Sandbox, handle: Handle) -> None:
    """Time is up, unless work or a renewal came in meanwhile."""
    cause = sandbox.time.taken().cause
    if cause is None:
        return
    if cause == "idle_timeout" and sandbox.time.kept.scoring is None:
        if await _commands_run(sandbox, handle):
            sandbox.activity.touch()
            return
        cause = sandbox.time.taken().cause
        if cause is None:
            return
        if cause == "idle_timeout" and sandbox.accepted.resolved.spec.on_timeout == "pause":
            sandbox.activity.touch()  # where it can't be paused: not again at once
            await sandbox.pauses.pause(handle, cause=cause)
            return
    if sandbox.time.due().then == "score":
        await _score(sandbox, cause)
    else:
        sandbox.end(Ending("stopped", cause))


async def _commands_run(sandbox: Sandbox, handle: Handle) -> bool:
    """Whether commands run that nobody follows, as after a restart of the edge."""
    driver = offered(sandbox.driver, Resumable)
    if driver is None:
        return False
    try:
        return await sandbox.fate.race(driver.commands(handle), LOOK_S) > 0
    except (DsecError, TimeoutError) as exc:
        log.warning("sandbox %s does not say what runs: %r", sandbox.uid, exc)
        return False


async def _score(sandbox: Sandbox, cause: str) -> None:
    """The agent's work is over, its sandbox stands on for who judges it. Where its
    processes cannot be ended it ends as a whole: no limit is without effect."""
    death = sandbox.time.score(cause).death()
    sandbox.activity.abort(death)
    try:
        await sandbox.fate.race(_clear(sandbox))
    except (DsecError, TimeoutError) as exc:
        log.warning("sandbox %s is not cleared for a verifier: %r", sandbox.uid, exc)
        sandbox.end(Ending("stopped", cause))
        return
    sandbox.time.cleared = True
    await sandbox.keep_time()


async def _clear(sandbox: Sandbox, *, spare: str | None = None) -> None:
    """Everything that runs in it is killed. Nothing that had been let in before begins
    anything afterwards: but for ``spare``'s, such operations have left."""
    driver = offered(sandbox.driver, Clearing)
    if driver is None:
        raise Unsupported(f"backend {sandbox.backend} kills single commands only", field="alone")
    async with asyncio.timeout(CLEAR_S):
        await sandbox.activity.left(spare=spare)
        async with sandbox.pauses.turn:
            await driver.clear(sandbox.present())


async def run_verify(sandbox: Sandbox, request: LeaseRequest, op: Any) -> LeaseReply:
    """The verb ``verify``. Another use of the same name by another principal is another
    lease."""
    await sandbox.found()
    holder = f"{op.call.principal}/{request.lease}"
    if request.lease_s == 0:
        sandbox.time.release(holder)
        await _kept(sandbox)
        return LeaseReply(op_id=request.op_id)
    held_s, left_s = sandbox.time.take(holder, request.lease_s, alone=request.alone)
    if request.alone:
        taken = Conflict("a verifier took the sandbox for itself", cause="cancelled")
        sandbox.activity.abort(taken, spare=holder)
        try:
            await _clear(sandbox, spare=holder)
        except TimeoutError:
            raise Unavailable("what runs in the sandbox does not end", cause="runtime") from None
    if request.offline:
        await _cut_off(sandbox, request.op_id)
    await _kept(sandbox)
    return LeaseReply(op_id=request.op_id, held_s=held_s, left_s=left_s)


async def _cut_off(sandbox: Sandbox, op_id: str) -> None:
    """By the way of any change of policy. One that reaches nothing anyway needs none."""
    spec = sandbox.accepted.resolved.spec
    if not spec.offline and rules.policy_of(spec).reaches_out:
        await sandbox.enforce(PolicyRequest(op_id=op_id, offline=True))


async def _kept(sandbox: Sandbox) -> None:
    await sandbox.keep_time()
    if sandbox.ending is None:
        sandbox.time.look()
