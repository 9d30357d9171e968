"""The audit of a project: its record, findings as they are made, and questions about both.

Owns: pages, following, walking the chain. Does not own: rules, verdicts, who may see what;
the services do. All of it needs the grant ``audit.read`` and nothing else, except
:meth:`Audit.report`, which is for graders (``sandbox.report``).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from libdsec import _ids
from libdsec._bounded import Bounded
from libdsec._manager import Manager, make
from libdsec._wire import (
    AuditEntry,
    AuditPage,
    AuditQuery,
    DryRunQuery,
    DryRunReply,
    Finding,
    GradingObservation,
    Ok,
    RuleInfo,
    RulesQuery,
    RulesReply,
    SandboxReport,
    SuggestQuery,
    SuggestReply,
    VerifyQuery,
    VerifyReply,
    decode,
)
from libdsec.errors import NotFound

FINDINGS_MAX = 10_000
"""Findings that may wait for a slow reader."""
PAGE = 200
EVIDENCE_MAX = 1_000
REPORT_S = 10.0
"""Longest wait of a grader for audit."""


@dataclass(frozen=True)
class Chain:
    """What a walk along the record's chain found. ``head`` (hex) is the hash of entry
    ``entries``: note it elsewhere, and compare. ``anchor``: the number it begins behind."""

    intact: bool
    entries: int
    head: str
    anchor: int = 0
    broken_at: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Explanation:
    """A finding with its rule, and the entries that it rests on, oldest first."""

    finding: Finding
    rule: RuleInfo | None
    evidence: Sequence[AuditEntry]


class Audit(Manager):
    """``client.audit``: the record of every verb and violation, and findings."""

    _entity = "audit"

    async def list(
        self,
        *,
        project: str | None = None,
        kind: str | None = None,
        principal: str | None = None,
        verb: str | None = None,
        target: str | None = None,
        outcome: str | None = None,
        request_id: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = 200,
    ) -> AsyncIterator[AuditEntry]:
        """Entries, newest first, at most ``limit`` (``None``: all). ``kind``: ``access``,
        ``violation``, ``finding``; of the latter ``verb`` is the rule and ``outcome`` the
        verdict or severity. ``since`` and ``until``: seconds since the epoch."""
        facts = {"principal": principal, "verb": verb, "target": target, "kind": kind}
        facts |= {"request_id": request_id, "project": project, "outcome": outcome}
        before: int | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            query = make(AuditQuery, since=since, until=until, before=before, limit=size, **facts)
            page = await self._read("list", query, AuditPage, project=project)
            for entry in page.entries:
                yield entry
            before = page.next
            if before is None or not page.entries:
                return
            left = None if left is None else left - len(page.entries)

    async def findings(
        self, *, project: str | None = None, since: float | None = None
    ) -> AsyncIterator[Finding]:
        """Findings as audit publishes them, from now on; with ``since`` first those of the
        record. Each comes once."""
        queue: Bounded[Finding] = Bounded(FINDINGS_MAX, "findings")

        async def put(message: Msg) -> None:
            queue.put(decode(message.data, Finding))

        subject = f"dsec.audit.v1.{self._project(project)}.>"
        end = await self._core.link.listen(subject, put)
        try:
            told = set()
            for finding in await self._recorded(project, since):
                told.add(finding.id)
                yield finding
            while True:
                finding = await queue.get()
                if finding.id not in told:
                    yield finding
        finally:
            await end()

    async def _recorded(self, project: str | None, since: float | None) -> Sequence[Finding]:
        if since is None:
            return []
        # project=…: a subscription to one project sees no other's below it
        mine = self._project(project)
        found = [
            make(Finding, **entry.record)
            async for entry in self.list(project=mine, kind="finding", since=since, limit=None)
        ]
        return found[::-1]

    async def rules(self, rule: str | None = None) -> Sequence[RuleInfo]:
        """The rules in force, or one of them."""
        reply: RulesReply = await self._read("rules", make(RulesQuery, rule=rule), RulesReply)
        return reply.rules

    async def dry_run(
        self,
        rules: str,
        *,
        project: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int = 20_000,
    ) -> DryRunReply:
        """What ``rules`` (the text of a rules file) would have found in the violations of
        the record. Raises ``InvalidRequest`` naming the rule and field at fault."""
        query = make(
            DryRunQuery, rules=rules, project=project, since=since, until=until, limit=limit
        )
        return await self._read("dry_run", query, DryRunReply, project=project)  # type: ignore[no-any-return]

    async def suggest(
        self,
        *,
        project: str | None = None,
        uid: str | None = None,
        job: str | None = None,
        task: str | None = None,
        since: float | None = None,
    ) -> SuggestReply:
        """The smallest changes of policy that would have let through what was denied."""
        query = make(SuggestQuery, project=project, uid=uid, job=job, task=task, since=since)
        return await self._read("suggest", query, SuggestReply, project=project)  # type: ignore[no-any-return]

    async def explain(self, id: str) -> Explanation:
        """A finding with everything it rests on. Raises ``NotFound``."""
        page = await self._read("list", make(AuditQuery, ids=[id], kind="finding"), AuditPage)
        if not page.entries:
            raise NotFound(f"there is no finding {id!r}", field="id")
        finding = make(Finding, **page.entries[0].record)
        query = make(AuditQuery, ids=list(finding.evidence), limit=EVIDENCE_MAX)
        rests_on = await self._read("list", query, AuditPage) if finding.evidence else page
        rule = next(iter(await self.rules(finding.rule)), None)
        evidence = rests_on.entries[::-1] if finding.evidence else []
        return Explanation(finding, rule, evidence)

    async def verify(self) -> Chain:
        """Has the whole chain recomputed, part by part."""
        reply: VerifyReply = await self._read("verify", VerifyQuery(), VerifyReply)
        begin, target = reply.anchor, reply.head
        while reply.broken_at is None and reply.seq < target:
            query = VerifyQuery(after=reply.seq, hash=reply.hash)
            reply = await self._read("verify", query, VerifyReply)
        return Chain(
            intact=reply.broken_at is None, entries=reply.seq, head=reply.hash, anchor=begin,
            broken_at=reply.broken_at, reason=reply.reason,
        )  # fmt: skip

    async def report(
        self, uid: str, observations: Sequence[GradingObservation], *, project: str | None = None
    ) -> None:
        """Tells what a grader saw of a sandbox of its project. Raises ``NotFound`` for a
        sandbox that is none of it."""
        request: Any = make(
            SandboxReport, request_id=_ids.new(), uid=uid, observations=list(observations)
        )
        subject = self._core.calls.req_subject(self._project(project), "sandbox", "report")
        await self._core.calls.change(subject, request, Ok, timeout_s=REPORT_S)
