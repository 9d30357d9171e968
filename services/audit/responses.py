"""What follows a finding: which response, and the request that carries it out. Pure.

Owns: the operator's table of responses, and the form of what is asked. Does not own: doing
it. A response is a request like any trainer's, through the same door: checked, recorded
and carried out like that, under audit's own name.
"""

from __future__ import annotations

import fnmatch
import tomllib
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.audit import Finding, Response, Severity
from schemas.base import encode
from schemas.image import SnapshotCreate
from schemas.sandbox import SandboxOpRequest, Tightening
from schemas.subjects import req
from shared import ids, policies
from shared.bus import Outgoing
from shared.errors import InvalidRequest, Unsupported
from shared.wire import to_wire

PRINCIPAL = "audit"
CAUSE = "policy_violation"
VERBS: dict[Response, tuple[str, ...]] = {
    "freeze": ("pause",), "kill": ("stop",), "quarantine": ("pause", "snapshot"),
    "tighten": ("tighten",),
}  # fmt: skip
"""Responses that are carried out, and the verbs that do it."""
SNAPSHOT = "snapshot"


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``do`` for findings of a project and rule (shell patterns), of some severities
    (all), of at least some confidence. ``tighten`` says how that is done; by default as
    the rule says, else no way out is left."""

    do: Response
    tighten: Tightening | None = None
    project: str = "*"
    rule: str = "*"
    severity: list[Severity] = []
    confidence: Annotated[float, Meta(ge=0, le=1)] = 0.0


class _File(msgspec.Struct, forbid_unknown_fields=True):
    response: list[Choice] = []


def read(text: str) -> list[Choice]:
    """The operator's table, the first that fits counts. Raises ``InvalidRequest``."""
    try:
        found = msgspec.convert(tomllib.loads(text), _File).response
        for choice in found:
            policies.tightened(policies.Policy(), choice.tighten)
        return found
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as exc:
        raise InvalidRequest(f"responses: {exc}", field="audit_responses") from exc


def choose(finding: Finding, choices: Sequence[Choice]) -> tuple[Response, Tightening | None]:
    """The operator's choice, else that of the rule, and by what to tighten."""
    for choice in choices:
        if (
            fnmatch.fnmatchcase(finding.project, choice.project)
            and fnmatch.fnmatchcase(finding.rule, choice.rule)
            and (not choice.severity or finding.severity in choice.severity)
            and finding.confidence >= choice.confidence
        ):
            return choice.do, choice.tighten or finding.tighten
    return finding.response, finding.tighten


def decide(finding: Finding, choices: Sequence[Choice]) -> tuple[Finding, list[Outgoing]]:
    """The finding as it is told, and the requests that answer it. A response that cannot
    be carried out is told as refused: nobody must take it for done."""
    response, how = choose(finding, choices)
    how = (how or policies.EVERYTHING) if response == "tighten" else None
    finding = msgspec.structs.replace(finding, response=response, tighten=how)
    if response == "alert":
        return finding, []
    verbs, uid = VERBS.get(response), finding.uid
    if uid is None:
        return _refused(finding, "the finding is about no sandbox"), []
    if verbs is None:
        return _refused(finding, f"nothing here can {response} a sandbox"), []
    if SNAPSHOT in verbs:
        name = f"{SNAPSHOT}/{_request_id(finding, SNAPSHOT)}"
        finding = msgspec.structs.replace(finding, snapshot=name)
    return finding, [_request(finding, uid, verb) for verb in verbs]


def _request(finding: Finding, uid: str, verb: str) -> Outgoing:
    request_id = _request_id(finding, verb)
    body: SandboxOpRequest | SnapshotCreate
    if verb == SNAPSHOT:
        body = SnapshotCreate(request_id=request_id, uid=uid)
    else:
        body = SandboxOpRequest(
            request_id=request_id, uids=[uid], cause=CAUSE, tighten=finding.tighten
        )
    return Outgoing(req(finding.project, "sandbox", verb, PRINCIPAL), encode(body))


def _request_id(finding: Finding, verb: str) -> str:
    return ids.derived(f"{finding.id}/{verb}")


def _refused(finding: Finding, why: str) -> Finding:
    error = to_wire(Unsupported(why, field="response"))
    return msgspec.structs.replace(finding, refused=error)
