"""Violations on their way to findings, over a real bus and database."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from nats.aio.msg import Msg

from schemas.audit import (
    AuditEntry,
    AuditPage,
    AuditQuery,
    AuditReport,
    DryRunQuery,
    DryRunReply,
    Finding,
    GradingObservation,
    RulesQuery,
    RulesReply,
    SandboxReport,
    SuggestQuery,
    SuggestReply,
    VerifyQuery,
    VerifyReply,
    Violation,
    Violations,
)
from schemas.base import HEADER_REPLY, ErrorReply, Ok, decode, encode
from schemas.sandbox import SandboxOpRequest
from schemas.subjects import cmd, rpc, sec
from services.audit.settings import RULES, Settings
from shared import ids
from shared.bus import Bus, Outgoing
from shared.errors import InvalidRequest
from tests.integration.services.conftest import SETTLE_S, Sandboxes

pytestmark = pytest.mark.integration


def violation(uid: str, **facts: Any) -> Violation:
    values = {
        "id": ids.new(), "at": time.time(), "node": "liar", "uid": uid, "project": "liars",
        "source": "bpf_lsm", "verdict": "denied", "rule": "files", "mechanism": "bpf-lsm",
        "actor": {"pid": 7, "comm": "cat"}, **facts,
    }  # fmt: skip
    return Violation(**values)


async def tell(bus: Bus, *told: Violation, node: str = "n1") -> Outgoing:
    body = encode(Violations(node=node, violations=list(told)))
    message = Outgoing(sec(told[0].source, told[0].verdict, node), body)
    await bus.store([message])
    return message


async def entries(bus: Bus, count: int, **query: Any) -> list[AuditEntry]:
    """The entries that match, once there are ``count``."""
    wanted = AuditQuery(limit=1000, **query)
    end = time.monotonic() + SETTLE_S
    while True:
        page = await bus.request(rpc("audit", "list"), wanted, AuditPage)
        if len(page.entries) >= count or time.monotonic() > end:
            assert len(page.entries) == count
            return page.entries
        await asyncio.sleep(0.03)


class Heard:
    """Messages of a subject, as their stream keeps them: what is sent again because its
    acknowledgement came late is there once."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Msg] = asyncio.Queue()
        self._ids: set[str] = set()

    async def on(self, bus: Bus, subject: str) -> Heard:
        async def put(message: Msg) -> None:
            id_ = (message.headers or {}).get("Nats-Msg-Id", "")
            if not id_ or id_ not in self._ids:
                self._ids.add(id_)
                self.queue.put_nowait(message)

        await bus.client.subscribe(subject, cb=put)
        await bus.client.flush()
        return self

    async def next(self) -> Msg:
        async with asyncio.timeout(SETTLE_S):
            return await self.queue.get()


async def test_a_violation_is_recorded_with_whose_sandbox_it_was(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="viol")
    told = violation(uid, rule="files.hidden:/answers", count=3, lost=2)
    await tell(bus, told)
    (entry,) = await entries(bus, 1, project="viol", kind="violation", target=uid)
    record = entry.record
    assert (record["rule"], record["count"], record["lost"]) == ("files.hidden:/answers", 3, 2)
    assert (record["node"], record["principal"]) == ("n1", "k1")
    assert (record["job"], record["task"]) == ("j1", "t1")
    assert entry.id == f"n1/{told.id}"


async def test_a_finding_is_told_once_with_its_evidence(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="found")
    heard = await Heard().on(bus, "dsec.audit.v1.found.>")
    message = await tell(bus, violation(uid, action="write", path="/bin/bash"))
    first = await heard.next()
    assert first.subject == "dsec.audit.v1.found.high.system_binary_overwritten"
    finding = decode(first.data, Finding)
    assert (finding.uid, finding.principal, finding.job, finding.task) == (uid, "k1", "j1", "t1")
    assert "/bin/bash" in finding.explanation
    (kept,) = await entries(bus, 1, project="found", kind="finding")
    assert kept.record["id"] == finding.id
    evidence = await entries(bus, 1, project="found", ids=finding.evidence)
    assert evidence[0].record["path"] == "/bin/bash"
    # the same message again, and the same attempt again
    await bus.store([message])
    await tell(bus, violation(uid, action="write", path="/bin/bash"))
    await entries(bus, 2, project="found", kind="violation")
    assert len(await entries(bus, 1, project="found", kind="finding")) == 1
    assert heard.queue.empty()


async def test_a_node_that_speaks_of_anothers_sandbox_is_the_finding(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(node="n1", project="victim")
    heard = await Heard().on(bus, "dsec.audit.v1.*.*.*")
    for claimed in (uid, ids.new()):
        told = violation(claimed, action="write", path="/bin/sh", project="victim")
        await tell(bus, told, node="n9")
    finding = decode((await heard.next()).data, Finding)
    assert (finding.rule, finding.project) == ("node_speaks_for_another", "root")
    assert "n9" in finding.explanation
    await entries(bus, 2, project="root", kind="violation", verb="files")
    assert await entries(bus, 0, project="victim") == []
    # its own node is believed, also right after
    await tell(bus, violation(uid, action="write", path="/bin/sh"))
    finding = decode((await heard.next()).data, Finding)
    assert (finding.rule, finding.project) == ("system_binary_overwritten", "victim")


async def test_nobody_is_blamed_while_the_scheduler_cannot_say(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="waits")
    sandboxes.there.clear()
    await tell(bus, violation(uid, action="write", path="/bin/sh"))
    async with asyncio.timeout(SETTLE_S):
        while not sandboxes.asked:
            await asyncio.sleep(0.01)
    assert await entries(bus, 0, project="root", target=uid) == []
    sandboxes.there.set()
    await entries(bus, 1, project="waits", kind="finding")


async def test_an_owner_is_asked_for_once(bus: Bus, audit: Settings, sandboxes: Sandboxes) -> None:
    uid = sandboxes.add(project="cached")
    for count in range(1, 4):
        await tell(bus, violation(uid))
        await entries(bus, count, project="cached")
    assert sandboxes.asked == 1


async def test_lost_events_are_part_of_the_record_and_raise_an_alarm(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    """(O03) 5,000 events of which some were lost: what was seen and what was not make
    5,000 exactly, and the loss is a finding."""
    uid = sandboxes.add(project="lossy")
    heard = await Heard().on(bus, "dsec.audit.v1.lossy.*.events_lost")
    batches = [violation(uid, source="observer", verdict="observed", rule="exec", action="exec",
                         count=90, lost=10) for _ in range(50)]  # fmt: skip
    await tell(bus, *batches)
    kept = await entries(bus, 50, project="lossy", kind="violation")
    assert sum(e.record["count"] + e.record["lost"] for e in kept) == 5_000
    assert decode((await heard.next()).data, Finding).count >= 10


@pytest.mark.parametrize(
    ("facts", "verb", "response"),
    [
        ({"source": "seccomp", "syscall": "ioctl", "subject": "0xc0c0586d"}, "stop", "kill"),
        ({"action": "write", "path": "/w/grader.py"}, "pause", "freeze"),
        ({"action": "connect", "path": "/run/chronus/a.sock"}, "tighten", "tighten"),
    ],
)
async def test_a_response_is_a_request_like_any_other(
    bus: Bus, audit: Settings, sandboxes: Sandboxes, facts: Any, verb: str, response: str
) -> None:
    uid = sandboxes.add(project="answered")
    heard = await Heard().on(bus, f"dsec.req.v1.answered.sandbox.{verb}.audit")
    message = await tell(bus, violation(uid, **facts))
    request = decode((await heard.next()).data, SandboxOpRequest)
    assert (request.uids, request.cause) == ([uid], "policy_violation")
    (kept,) = await entries(bus, 1, project="answered", kind="finding", target=uid)
    assert kept.record["response"] == response
    await bus.store([message])
    await tell(bus, violation(uid, rule="later"))
    await entries(bus, 2, project="answered", kind="violation", target=uid)
    assert heard.queue.empty()


async def report(bus: Bus, project: str, uid: str, **seen: Any) -> Ok | ErrorReply:
    """What a grader's report is answered with."""
    inbox = bus.client.new_inbox()
    answers = await Heard().on(bus, inbox)
    told = AuditReport(
        project=project, principal="grader", at=time.time(),
        report=SandboxReport(
            request_id=ids.new(), uid=uid, observations=[GradingObservation(**seen)]
        ),
    )  # fmt: skip
    subject = cmd("audit", "report", project)
    await bus.store([Outgoing(subject, encode(told), {HEADER_REPLY: inbox})])
    data = (await answers.next()).data
    return decode(data, ErrorReply) if b'"error"' in data else decode(data, Ok)


async def test_what_a_grader_saw_is_a_finding_of_its_own_projects_sandbox(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="graded")
    heard = await Heard().on(bus, "dsec.audit.v1.graded.>")
    assert isinstance(await report(bus, "graded", uid, what="process_alive", subject="sleep"), Ok)
    finding = decode((await heard.next()).data, Finding)
    assert (finding.rule, finding.uid) == ("processes_at_grading", uid)
    for project, target in (("other", uid), ("graded", ids.new())):
        refused = await report(bus, project, target, what="test_file_edited", subject="x")
        assert isinstance(refused, ErrorReply)
        assert refused.error.code == "not_found"
    assert await entries(bus, 0, project="other") == []
    assert len(await entries(bus, 1, project="graded", kind="violation")) == 1


async def test_rules_can_be_tried_over_what_was_recorded(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="tried")
    await tell(bus, *(violation(uid, path=f"/data/{n}", rule="quiet") for n in range(5)))
    await entries(bus, 5, project="tried", kind="violation")
    rules = (
        '[[rule]]\nid = "mine"\ntitle = "M"\nseverity = "low"\nconfidence = 1.0\n'
        'explanation = "{measured} of {path}"\nthreshold = 5\nwindow_s = 60\n'
        'match = [ { path = ["/data/*"] } ]\n'
    )
    trial = DryRunQuery(rules=rules, projects=["tried"])
    reply = await bus.request(rpc("audit", "dry_run"), trial, DryRunReply)
    assert (reply.events, reply.complete) == (5, True)
    assert [(f.rule, f.explanation) for f in reply.findings] == [("mine", "5 of /data/4")]
    assert await entries(bus, 0, project="tried", kind="finding") == []
    for wrong in (DryRunQuery(rules="x = 1", projects=["tried"]), DryRunQuery(rules=rules)):
        with pytest.raises(InvalidRequest):
            await bus.request(rpc("audit", "dry_run"), wrong, DryRunReply)


async def test_rules_and_suggestions_are_answered(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="asked")
    await tell(
        bus,
        violation(uid, source="landlock", action="open", path="/opt/data/x", count=4),
        violation(uid, action="connect", path="/run/chronus/a.sock"),
    )
    await entries(bus, 2, project="asked", kind="violation")
    query = SuggestQuery(projects=["asked"], uid=uid)
    reply = await bus.request(rpc("audit", "suggest"), query, SuggestReply)
    found = [(s.path, s.value, s.count, s.withheld) for s in reply.suggestions]
    assert found[0] == ("files.hidden", "/opt/data/x", 4, "")
    assert found[1][3] == "forged_request"
    rules = await bus.request(rpc("audit", "rules"), RulesQuery(), RulesReply)
    text = "".join(path.read_text() for path in RULES.glob("*.toml"))
    assert len(rules.rules) == text.count("[[rule]]")


async def test_the_chain_is_verified_in_parts(
    bus: Bus, audit: Settings, sandboxes: Sandboxes
) -> None:
    uid = sandboxes.add(project="chained")
    await tell(bus, *(violation(uid) for _ in range(30)))
    await entries(bus, 30, project="chained", kind="violation")
    whole = await bus.request(rpc("audit", "verify"), VerifyQuery(), VerifyReply)
    assert (whole.broken_at, whole.seq) == (None, whole.head)
    part = VerifyQuery(after=whole.seq, hash=whole.hash)
    rest = await bus.request(rpc("audit", "verify"), part, VerifyReply)
    assert rest.broken_at is None
    wrong = VerifyQuery(after=whole.seq - 3, hash="00" * 32)
    broken = await bus.request(rpc("audit", "verify"), wrong, VerifyReply)
    assert broken.broken_at == whole.seq - 2
