"""From messages to rows of the record. Pure.

The reporter is taken from the subject, which the bus lets nobody else use, never
from the body: a captured edge can speak for itself only, and cannot take the id of
another's record to suppress it. Whose a sandbox is comes from the scheduler's word for
it (:mod:`services.audit.correlation`), likewise never from the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from schemas.audit import AuditReport, Finding, Violation
from schemas.base import decode
from services.audit.chain import clean
from services.audit.owners import Owner

ACCESS, VIOLATION, FINDING, RETENTION = "access", "violation", "finding", "retention"
OWN, FOREIGN, NODE, GRADER = "own", "foreign", "node", "grader"
AHEAD_S = 60.0
"""How far a node's clock may be ahead: its word could empty a rule's window else."""
_NUL = rb"\u0000"
"""Without it no text of a JSON document has a NUL."""


class Row(NamedTuple):
    """One record before it has its place in the chain. ``at``: seconds since the
    epoch. ``record`` is clean (see :func:`services.audit.chain.clean`): of an access as
    :class:`Recorded`, of anything else, and read from the record, by name."""

    kind: str
    record_id: str
    at: float
    project: str
    principal: str
    verb: str
    target: str
    outcome: str
    request_id: str
    record: Any


COLUMNS = Row._fields[:-1]


class Recorded(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of ``Access`` and its reporter, in the order of the chain's spelling: most
    entries are accesses, and to be made from dictionaries would double their cost."""

    at: float
    bytes: int = 0
    count: int = 1
    entity: str = ""
    id: str
    node: str = ""
    outcome: str
    principal: str
    project: str
    request_id: str = ""
    sha256: str = ""
    source: str = ""
    target: str = ""
    trace: str = ""
    verb: str


class _Told(msgspec.Struct):
    """The fields of ``AccessRecords``."""

    source: str
    records: list[Recorded]
    v: int = 1


def reporter(subject: str) -> tuple[str, str | None]:
    """``(source, node)`` of ``dsec.evt.v1.<service>.access.<key>``; the key names a
    node only where the service is an edge."""
    parts = subject.split(".")
    service, key = parts[3], parts[-1]
    return (f"edge.{key}", key) if service == "edge" else (service, None)


def from_accesses(subject: str, data: bytes) -> Iterator[Row]:
    """The rows of a message of access records. Raises ``BadMessage``."""
    source, node = reporter(subject)
    told = decode(data, _Told).records
    if _NUL in data:
        told = [msgspec.convert(clean(msgspec.to_builtins(one)), Recorded) for one in told]
    for one in told:
        one.source = source
        if node is not None:
            one.node = node
        at = one.at
        if at.is_integer():
            one.at = int(at)
        yield Row(
            ACCESS, f"{source}/{one.id}", at, one.project, one.principal, one.verb, one.target,
            one.outcome, one.request_id, one,
        )  # fmt: skip


def from_violation(
    node: str, violation: Violation, owners: Mapping[str, Owner], *, root: str, now: float
) -> Row:
    """The row of one violation that ``node`` reports. What is not about a sandbox of that
    node belongs to the project ``root``, whose readers look after nodes."""
    record = msgspec.to_builtins(violation)
    record["node"] = node
    if violation.at > now + AHEAD_S:
        record["at"], record["claimed_at"] = now, violation.at
    owner = owners.get(violation.uid)
    if not violation.uid:
        _belongs(record, NODE, project=root)
    elif owner is None or owner.node != node:
        _belongs(record, FOREIGN, project=root)
    else:
        _owned(record, OWN, owner)
    return row(VIOLATION, clean(record))


def from_report(report: AuditReport, owner: Owner) -> list[Row]:
    """The rows of what a grader saw, which its own project's owner of the sandbox bears."""
    rows = []
    for number, seen in enumerate(report.report.observations):
        record: dict[str, Any] = {
            "id": f"report-{report.project}-{report.report.request_id}-{number}",
            "at": report.at, "node": "", "uid": owner.uid, "source": GRADER,
            "verdict": "observed", "rule": seen.what, "mechanism": "report",
            "subject": seen.subject, "count": seen.count, "reporter": report.principal,
        }  # fmt: skip
        _owned(record, GRADER, owner)
        rows.append(row(VIOLATION, clean(record)))
    return rows


def from_finding(finding: Finding) -> Row:
    """The row of a finding."""
    return row(FINDING, clean(msgspec.to_builtins(finding)))


def from_anchor(*, seq: int, hash_: bytes, day: str, entries: int, at: float, root: str) -> Row:
    """The row that says which entries are gone, and by which hash they ended."""
    record = {
        "id": f"retention-{seq}", "at": at, "project": root, "seq": seq, "hash": hash_.hex(),
        "day": day, "entries": entries,
    }  # fmt: skip
    return row(RETENTION, clean(record))


def _belongs(record: dict[str, Any], attribution: str, *, project: str) -> None:
    record["attribution"], record["project"] = attribution, project


def _owned(record: dict[str, Any], attribution: str, owner: Owner) -> None:
    _belongs(record, attribution, project=owner.project)
    facts = {"principal": owner.principal, "job": owner.job, "task": owner.task}
    record.update({name: value for name, value in facts.items() if value})


def row(kind: str, record: dict[str, Any]) -> Row:
    """The row of a stored record: its columns are functions of its content, which
    is how ``verify`` finds a changed column."""
    get = record.get
    at, project, principal = float(get("at", 0)), get("project", ""), get("principal") or ""
    if kind == VIOLATION:
        return Row(
            kind, f"{get('node')}/{get('id')}", at, project, principal, get("rule", ""),
            get("uid", ""), get("verdict", ""), "", record,
        )  # fmt: skip
    if kind == FINDING:
        return Row(
            kind, get("id", ""), at, project, principal, get("rule", ""), get("uid") or "",
            get("severity", ""), "", record,
        )  # fmt: skip
    if kind == RETENTION:
        return Row(kind, get("id", ""), at, project, "", "retention", "", "ok", "", record)
    return Row(
        kind, f"{get('source')}/{get('id')}", at, project, principal, get("verb", ""),
        get("target", ""), get("outcome", ""), get("request_id", ""), record,
    )  # fmt: skip
