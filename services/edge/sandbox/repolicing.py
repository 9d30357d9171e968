"""A policy that changes while its sandbox runs.

Owns: from a request to a spec, the order of it: judged, in force, journalled, told. Does
not own: rules (:mod:`shared.policies`), putting them into force (the driver).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from msgspec.structs import replace

from schemas.control import PolicyReply, PolicyRequest
from schemas.sandbox import SandboxSpec, Tightening
from services.edge.drivers.base import Handle
from services.edge.drivers.offers import offered
from services.edge.drivers.policing import Enforcing
from services.edge.journal import records
from services.edge.sandbox import rules
from services.edge.sandbox.ending import Ending
from shared import policies
from shared.errors import DsecError, InvalidRequest, SandboxDied, Unsupported

if TYPE_CHECKING:
    from services.edge.sandbox.actor import Context, Sandbox

_changes: set[asyncio.Task[Handle]] = set()
"""Changes that go on: the loop alone would forget them."""


def check(request: PolicyRequest) -> None:
    """Raises ``InvalidRequest`` where nothing is to change."""
    asked = (request.network_rules, request.policy, request.stage, request.offline)
    if all(part is None for part in asked):
        raise InvalidRequest("name network_rules, policy or stage", field="policy")


def changed(spec: SandboxSpec, request: PolicyRequest) -> SandboxSpec:
    """The spec with what the request names; a stage is the document's."""
    if request.network_rules is not None:
        spec = replace(spec, network_rules=request.network_rules)
    if request.policy is not None:
        spec = replace(spec, policy=request.policy)
    if request.stage is not None:
        spec = replace(spec, policy={**(spec.policy or {}), "stage": request.stage or None})
    if request.offline is not None:
        spec = replace(spec, offline=request.offline)
    return spec


async def enforce(sandbox: Sandbox, context: Context, request: PolicyRequest) -> Handle:
    """Puts the changed policy into force as a whole, and only then says so. One at a time;
    a paused sandbox stays paused. Raises typed errors, and the old one is in force: where
    it cannot be, the sandbox ends. Who asked may leave: that splits no change."""
    change = asyncio.ensure_future(_enforce(sandbox, context, request))
    _changes.add(change)
    change.add_done_callback(_changes.discard)
    return await asyncio.shield(change)


async def _enforce(sandbox: Sandbox, context: Context, request: PolicyRequest) -> Handle:
    driver = offered(sandbox.driver, Enforcing)
    if driver is None:
        raise Unsupported(f"backend {sandbox.backend} keeps its policy", field="policy")
    async with sandbox.repolicing:
        handle = sandbox.present()
        accepted = sandbox.accepted
        spec = changed(accepted.resolved.spec, request)
        refusal = rules.check_spec(spec, context.report(sandbox.backend))
        if refusal is not None:
            raise refusal
        resolved = replace(accepted.resolved, spec=spec)
        wanted = rules.start_spec(accepted.item, resolved, [])
        try:
            sandbox.handle = handle = await driver.set_policy(handle, wanted)
        except SandboxDied as exc:
            _end(sandbox, exc)
            raise
        sandbox.accepted = _with(sandbox, resolved.spec)
        change = records.repoliced(sandbox.uid, sandbox.accepted, handle)
        try:
            await context.observer.emit([sandbox.observation()], change)
        except Exception:
            await _take_back(sandbox, driver, accepted)
            raise
        return handle


async def _take_back(sandbox: Sandbox, driver: Enforcing, accepted: records.Accepted) -> None:
    """What was not journalled is not in force: the next edge would not know of it."""
    sandbox.accepted = accepted = _with(sandbox, accepted.resolved.spec)
    spec = rules.start_spec(accepted.item, accepted.resolved, [])
    try:
        sandbox.handle = await driver.set_policy(sandbox.present(), spec)
    except DsecError as exc:
        _end(sandbox, exc)


def _with(sandbox: Sandbox, spec: SandboxSpec) -> records.Accepted:
    """What was accepted with another spec; a tightening that came meanwhile stays."""
    accepted = sandbox.accepted
    spec = replace(spec, tighten=accepted.resolved.spec.tighten)
    return replace(accepted, resolved=replace(accepted.resolved, spec=spec))


def note(sandbox: Sandbox, wanted: Tightening) -> records.Change:
    """From here on the sandbox's spec is stricter, for this process and the next: what is
    put into force later comes under it, whoever asks."""
    accepted = sandbox.accepted
    spec = accepted.resolved.spec
    spec = replace(spec, tighten=policies.merged(spec.tighten, wanted))
    sandbox.accepted = replace(accepted, resolved=replace(accepted.resolved, spec=spec))
    return records.respecified(sandbox.uid, sandbox.accepted)


def inherit(sandbox: Sandbox, source: SandboxSpec) -> None:
    """A branch begins under the policy that its source was under."""
    accepted = sandbox.accepted
    spec = policies.carried(accepted.resolved.spec, source)
    sandbox.accepted = replace(accepted, resolved=replace(accepted.resolved, spec=spec))


def inherited(sandbox: Sandbox) -> list[records.Change]:
    """To be journalled with a branch's handle: an edge that finds it by that must know what
    it is under, and one that does not starts it anew."""
    if sandbox.accepted.resolved.branch is None:
        return []
    return [records.respecified(sandbox.uid, sandbox.accepted)]


async def tighten(sandbox: Sandbox, context: Context) -> None:
    """Puts what was noted into force; a paused sandbox stays paused. Where it cannot be,
    the sandbox ends: it does not go on under what somebody found too little."""
    driver = offered(sandbox.driver, Enforcing)
    async with sandbox.repolicing:
        accepted = sandbox.accepted
        try:
            if driver is None:
                raise Unsupported(f"backend {sandbox.backend} keeps its policy", field="policy")
            wanted = rules.start_spec(accepted.item, accepted.resolved, [])
            sandbox.handle = await driver.set_policy(sandbox.present(), wanted)
        except DsecError as exc:
            text = f"it cannot be made stricter: {exc.message}"
            sandbox.end(Ending("stopped", "policy_violation", text, exc))
            return
        change = records.repoliced(sandbox.uid, sandbox.accepted, sandbox.handle)
        await context.observer.emit([sandbox.observation()], change)


def _end(sandbox: Sandbox, error: DsecError) -> None:
    """No sandbox runs under a policy that nobody asked for."""
    sandbox.end(Ending("failed", error.cause or "internal", error.message, error))


async def run_policy(sandbox: Sandbox, request: PolicyRequest, _op: object) -> PolicyReply:
    """The verb ``policy``."""
    await sandbox.found()
    handle = await sandbox.enforce(request)
    return PolicyReply(op_id=request.op_id, enforcement=dict(handle.enforcement))
