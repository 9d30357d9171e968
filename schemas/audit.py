"""Messages of audit: access records, violations, findings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas.base import Message, UnixTime, Versioned


class Access(Message, frozen=True):
    """One verb, once: who, what, when, outcome. Hashes and sizes, no payloads.

    ``id`` makes the record idempotent. ``outcome`` is ``ok`` or an error code;
    ``bytes`` the size of the request's body.
    """

    id: str
    at: UnixTime
    project: str
    principal: str
    verb: str
    outcome: str
    entity: str = ""
    target: str = ""
    request_id: str = ""
    sha256: str = ""
    bytes: int = 0
    count: int = 1
    node: str = ""
    trace: str = ""


class AccessRecords(Versioned, frozen=True):
    """door → audit, ``dsec.evt.v1.<service>.access.<key>``."""

    source: str
    records: list[Access]


class Destination(Message, frozen=True):
    """Where a sandbox wanted to go. ``protocol`` is ``tcp``, ``udp``, ``icmp`` or
    ``ip-<number>``; ``domain`` the name, where one is known; ``port`` 0: there is none."""

    address: str = ""
    port: int = 0
    protocol: str = ""
    domain: str = ""


class Violation(Message, frozen=True):
    """Something a sandbox was denied. ``rule`` and ``mechanism`` say by what;
    ``actor`` is the process (pid, comm, user) as the kernel named it, where it did.

    Sources and what they fill in: ``bpf_net`` (``destination``, ``actor``), ``dns``
    (``destination.domain``), ``sni`` (``destination``), ``seccomp`` (``syscall``),
    ``landlock``, ``apparmor``, ``bpf_lsm``, ``observer`` (``path``), ``resource``,
    ``policy`` (a rule that could not be put into force), ``layers``.

    One violation stands for ``count`` equal ones from ``first_at`` to ``at`` (the count
    is exact, details are those of the last); ``lost`` are further ones of that time
    whose details are not known at all. ``targets`` is how many different destinations
    a summary stands for, ``samples`` some of them: a port scan is one violation.
    ``id`` makes it idempotent. ``policy`` and ``stage`` are what was in force.
    """

    id: str
    at: UnixTime
    node: str
    uid: str
    project: str
    source: str
    verdict: Literal["denied", "observed", "killed"]
    rule: str
    mechanism: str
    actor: dict[str, Any] = {}
    subject: str = ""
    count: int = 1
    lost: int = 0
    action: str = ""
    first_at: UnixTime = 0.0
    destination: Destination | None = None
    path: str = ""
    syscall: str = ""
    targets: int = 0
    samples: list[str] = []
    policy: str = ""
    stage: str = ""


class Violations(Versioned, frozen=True):
    """edge → audit, ``dsec.sec.v1.<source>.<verdict>.<node>``."""

    node: str
    violations: list[Violation]


class Finding(Versioned, frozen=True):
    """audit → security team, ``dsec.audit.v1.<project>.<severity>.<rule>``."""

    id: str
    at: UnixTime
    project: str
    severity: Literal["info", "low", "medium", "high", "critical"]
    rule: str
    explanation: str
    uid: str | None = None
    principal: str | None = None
    evidence: list[str] = []
    confidence: Annotated[float, Meta(ge=0, le=1)] = 1.0


class AuditQuery(Versioned, frozen=True):
    """``get audit.list``: newest first; ``before`` is the last id of the page before."""

    project: str | None = None
    principal: str | None = None
    verb: str | None = None
    target: str | None = None
    request_id: str | None = None
    since: UnixTime | None = None
    before: int | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    projects: list[str] = []


class AuditEntry(Message, frozen=True):
    """A stored record: its number, its content, and the chain hash over both."""

    seq: int
    kind: str
    record: dict[str, Any]
    hash: str


class AuditPage(Versioned, frozen=True):
    """Entries, newest first; ``next`` is set where more follow."""

    entries: list[AuditEntry]
    next: int | None = None
