"""From messages to rows of the record. Pure.

The reporter is taken from the subject, which the bus lets nobody else use, never
from the body: a captured edge can speak for itself only, and cannot take the id of
another's record to suppress it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.audit import Access, Violation
from services.audit.chain import clean

ACCESS, VIOLATION = "access", "violation"


@dataclass(frozen=True, slots=True)
class Row:
    """One record before it has its place in the chain. ``at``: seconds since the
    epoch. ``record`` is clean (see :func:`services.audit.chain.clean`)."""

    kind: str
    record_id: str
    at: float
    project: str
    principal: str
    verb: str
    target: str
    outcome: str
    request_id: str
    record: dict[str, Any]


def reporter(subject: str) -> tuple[str, str | None]:
    """``(source, node)`` of ``dsec.evt.v1.<service>.access.<key>``; the key names a
    node only where the service is an edge."""
    parts = subject.split(".")
    service, key = parts[3], parts[-1]
    return (f"edge.{key}", key) if service == "edge" else (service, None)


def from_access(source: str, access: Access, *, node: str | None = None) -> Row:
    """The row of one access record."""
    record = msgspec.to_builtins(access)
    record["source"] = source
    if node is not None:
        record["node"] = node
    return row(ACCESS, clean(record))


def from_violation(node: str, violation: Violation) -> Row:
    """The row of one violation."""
    record = msgspec.to_builtins(violation)
    record["node"] = node
    return row(VIOLATION, clean(record))


def row(kind: str, record: dict[str, Any]) -> Row:
    """The row of a stored record: its columns are functions of its content, which
    is how ``verify`` finds a changed column."""
    get = record.get
    if kind == VIOLATION:
        return Row(
            kind, f"{get('node')}/{get('id')}", float(get("at", 0)), get("project", ""), "",
            get("rule", ""), get("uid", ""), get("verdict", ""), "", record,
        )  # fmt: skip
    return Row(
        kind, f"{get('source')}/{get('id')}", float(get("at", 0)), get("project", ""),
        get("principal", ""), get("verb", ""), get("target", ""), get("outcome", ""),
        get("request_id", ""), record,
    )  # fmt: skip
