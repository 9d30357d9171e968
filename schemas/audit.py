"""Messages of audit: access records, violations, findings, and what is asked of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas.base import Message, Token, Uid, UnixTime, Versioned, WireError
from schemas.sandbox import Tightening


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


Severity = Literal["info", "low", "medium", "high", "critical"]
Response = Literal["alert", "tighten", "freeze", "kill", "quarantine"]


class Finding(Versioned, frozen=True):
    """audit → security team, ``dsec.audit.v1.<project>.<severity>.<rule>``.

    ``count`` is what the rule measured (events, different targets, bytes) from
    ``first_at`` to ``at``, ``total`` all of it since the rule first fired; ``evidence``
    are ids of records. ``response`` is what was asked for, ``refused`` why it could not be,
    ``snapshot`` the name under which the sandbox's disk is kept, ``tighten`` by what the
    sandbox was made stricter.
    """

    id: str
    at: UnixTime
    project: str
    severity: Severity
    rule: str
    explanation: str
    uid: str | None = None
    principal: str | None = None
    evidence: list[str] = []
    confidence: Annotated[float, Meta(ge=0, le=1)] = 1.0
    title: str = ""
    node: str = ""
    job: str | None = None
    task: str | None = None
    count: int = 1
    total: int = 1
    first_at: UnixTime = 0.0
    response: Response = "alert"
    refused: WireError | None = None
    snapshot: str | None = None
    tighten: Tightening | None = None


class AuditQuery(Versioned, frozen=True):
    """``get audit.list``: newest first; ``before`` is the last number of the page before.
    ``kind``: ``access``, ``violation``, ``finding`` or ``retention``; of findings ``verb``
    is the rule and ``outcome`` the severity, of violations the rule and the verdict."""

    project: str | None = None
    principal: str | None = None
    verb: str | None = None
    target: str | None = None
    request_id: str | None = None
    since: UnixTime | None = None
    before: int | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    projects: list[str] = []
    kind: str | None = None
    outcome: str | None = None
    until: UnixTime | None = None
    ids: Annotated[list[str], Meta(max_length=1000)] = []


class AuditEntry(Message, frozen=True):
    """A stored record: its number, its content, and the chain hash over both. ``id``
    names it in queries (``ids``) and in the evidence of findings."""

    seq: int
    kind: str
    record: dict[str, Any]
    hash: str
    id: str = ""


class AuditPage(Versioned, frozen=True):
    """Entries, newest first; ``next`` is set where more follow."""

    entries: list[AuditEntry]
    next: int | None = None


class RuleInfo(Message, frozen=True):
    """A rule of audit. ``measure`` reaches ``threshold`` within ``window_s``."""

    id: str
    title: str
    severity: Severity
    confidence: float
    explanation: str
    threshold: int = 1
    window_s: float = 0.0
    measure: str = "events"
    respond: Response = "alert"


class RulesQuery(Versioned, frozen=True):
    """``get audit.rules``."""

    rule: str | None = None


class RulesReply(Versioned, frozen=True):
    """The rules in force."""

    rules: list[RuleInfo]


class DryRunQuery(Versioned, frozen=True):
    """``get audit.dry_run``: what ``rules`` (a rules file's text) would have found in the
    violations of the record. Nothing is told or done."""

    rules: Annotated[str, Meta(min_length=1, max_length=100_000)]
    project: str | None = None
    since: UnixTime | None = None
    until: UnixTime | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 20_000
    projects: list[str] = []


class DryRunReply(Versioned, frozen=True):
    """``events`` were looked at; ``complete`` is false where there are more of them, or
    more findings than fit."""

    events: int
    findings: list[Finding]
    complete: bool = True


class VerifyQuery(Versioned, frozen=True):
    """``get audit.verify``: a part of the chain. ``after`` and ``hash`` (hex) are where the
    part before ended; without them it begins where the record does."""

    after: int | None = None
    hash: str | None = None


class VerifyReply(Versioned, frozen=True):
    """``seq`` and ``hash``: up to where the chain holds; ``head``: the newest number when
    this part was begun; ``anchor``: the number it begins behind, once older days are
    gone. ``broken_at`` with its ``reason`` where it does not hold."""

    seq: int
    hash: str
    head: int
    anchor: int = 0
    broken_at: int | None = None
    reason: str = ""


class SuggestQuery(Versioned, frozen=True):
    """``get audit.suggest``: the smallest change of policy that would have let through
    what was denied in sandboxes (``uid``, ``job``, ``task``; all of the project)."""

    project: str | None = None
    uid: str | None = None
    job: str | None = None
    task: str | None = None
    since: UnixTime | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 20_000
    projects: list[str] = []


class Suggestion(Message, frozen=True):
    """One change: ``value`` is added at ``path`` of the policy document (with ``remove``:
    goes from there; ``higher``: a limit is to be). ``count`` denials in
    ``sandboxes`` sandboxes asked for it. ``withheld``: a rule that takes these denials
    for an attack, so it is named and not suggested."""

    path: str
    value: str
    count: int
    sandboxes: int
    reason: str = ""
    withheld: str = ""
    remove: bool = False


class SuggestReply(Versioned, frozen=True):
    """Suggestions, those asked for most first."""

    events: int
    suggestions: list[Suggestion]


class GradingObservation(Message, frozen=True):
    """What a grader saw of an agent's sandbox: a process that still ran when it was
    graded, a test file or a protected file that the agent had changed."""

    what: Literal["process_alive", "test_file_edited", "protected_file_edited"]
    subject: Annotated[str, Meta(min_length=1, max_length=4096)]
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1


class SandboxReport(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.sandbox.report[.<principal>]``: what a grader
    saw. It counts only where the sandbox is one of that project."""

    request_id: Uid
    uid: Uid
    observations: Annotated[list[GradingObservation], Meta(min_length=1, max_length=256)]


class AuditReport(Versioned, frozen=True):
    """auth → audit, ``dsec.cmd.v1.audit.report.<project>``: a :class:`SandboxReport`,
    admitted."""

    project: Token
    principal: str
    at: UnixTime
    report: SandboxReport
