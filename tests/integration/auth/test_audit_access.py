"""Who may see findings, who may report, and that every door leaves a record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from schemas.grants import AUDIT_READS, GET_GRANTS, GET_VERBS, REQ_GRANTS
from schemas.subjects import cmd
from shared import ids
from shared.bus import Outgoing
from tests.integration.auth.conftest import (
    MARKS,
    ROOT,
    Person,
    Records,
    Stack,
    connect,
    new_key,
    new_project,
)

pytestmark = MARKS

SETTLE_S = 0.15
ACCESS_S = 60.0


async def refusals(person: Person) -> int:
    """How often the server has said no so far."""
    await person.nc.flush()
    await asyncio.sleep(SETTLE_S)
    return sum("permissions violation" in str(error).lower() for error in person.errors)


async def test_a_security_key_hears_its_projects_findings_and_nothing_else(
    stack: Stack, admin: Person
) -> None:
    mine, other = await new_project(admin), await new_project(admin)
    below = await new_project(admin, mine)
    key = await new_key(admin, mine, "audit.read", kind="service")
    guard = await connect(stack, key["secret"])
    heard: list[str] = []

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    await guard.nc.subscribe(f"dsec.audit.v1.{mine}.>", cb=hear)
    await guard.nc.subscribe(f"dsec.audit.v1.{below}.high.*", cb=hear)
    await guard.nc.flush()
    assert await refusals(guard) == 0
    for project in (mine, below, other):
        await stack.bus.client.publish(f"dsec.audit.v1.{project}.high.port_scan", b"{}")
    await stack.bus.client.flush()
    async with asyncio.timeout(ACCESS_S):
        while len(heard) < 2:
            await asyncio.sleep(0.02)
    await asyncio.sleep(SETTLE_S)  # one too many would come about now
    assert sorted(heard) == sorted(f"dsec.audit.v1.{p}.high.port_scan" for p in (mine, below))

    closed = (
        f"dsec.audit.v1.{other}.>", "dsec.audit.v1.>", "dsec.audit.v1.*.high.port_scan",
        f"dsec.evt.v1.sandbox.{mine}.>", "dsec.evt.v1.>", "dsec.sec.v1.>", "dsec.cmd.v1.>",
        "dsec.req.v1.>", "dsec.hb.v1.*", "_INBOX.>", ">",
    )  # fmt: skip
    for count, subject in enumerate(closed, 1):
        await guard.nc.subscribe(subject, cb=hear)
        await guard.nc.flush()
        assert await refusals(guard) == count, subject
    silent = (
        f"dsec.audit.v1.{mine}.high.port_scan", f"dsec.req.v1.{mine}.sandbox.stop",
        f"dsec.req.v1.{mine}.sandbox.report", f"dsec.get.v1.{mine}.sandbox.list",
        "dsec.sec.v1.bpf_net.denied.n1", f"dsec.get.v1.{other}.audit.list",
        f"dsec.cmd.v1.audit.report.{mine}",
    )  # fmt: skip
    for count, subject in enumerate(silent, len(closed) + 1):
        await guard.nc.publish(subject, b"{}")
        assert await refusals(guard) == count, subject
    await guard.nc.close()


async def test_a_trainer_hears_no_findings(stack: Stack, admin: Person) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.*", "job.*", "image.*")
    trainer = await connect(stack, key["secret"])
    await trainer.nc.subscribe(f"dsec.audit.v1.{project}.>")
    await trainer.nc.flush()
    assert await refusals(trainer) == 1
    for count, verb in enumerate(AUDIT_READS, 2):
        await trainer.nc.publish(f"dsec.get.v1.{project}.audit.{verb}", b"{}")
        assert await refusals(trainer) == count
    await trainer.nc.close()


async def test_a_graders_report_goes_to_audit_under_its_own_name(
    stack: Stack, admin: Person
) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.*")
    grader = await connect(stack, key["secret"])
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def hear(message: Any) -> None:
        told.put_nowait(message)

    listening = await stack.bus.client.subscribe(cmd("audit", "report", project), cb=hear)
    await stack.bus.client.flush()
    body = {
        "request_id": ids.new(), "uid": ids.new(),
        "observations": [{"what": "process_alive", "subject": "sleep"}],
    }  # fmt: skip
    subject = f"dsec.req.v1.{project}.sandbox.report.{grader.principal}"
    await grader.nc.publish(subject, json.dumps(body).encode())
    async with asyncio.timeout(ACCESS_S):
        command = json.loads((await told.get()).data)
    assert (command["project"], command["principal"]) == (project, grader.principal)
    assert command["report"]["uid"] == body["uid"]
    wrong = await grader.request(project, "sandbox", "report", {**body, "observations": []})
    assert wrong["error"]["field"] == "observations"
    await listening.unsubscribe()
    await grader.nc.close()


async def test_every_verb_at_every_door_leaves_one_record(stack: Stack, admin: Person) -> None:
    """(O08) All verbs that there are, each asked once and mostly wrongly, and a request of
    a service: one record each, with who, what, when and how it ended."""
    project = await new_project(admin)
    records = Records()
    listening = await records.on(stack.bus.client)
    wanted = []
    for grant in sorted(REQ_GRANTS):
        place = ROOT if grant.startswith("node.") else project
        entity, verb = grant.split(".")
        body = json.dumps({"request_id": ids.new()}).encode()
        await admin.nc.publish(f"dsec.req.v1.{place}.{entity}.{verb}.{admin.principal}", body)
        wanted.append((grant, place, admin.principal))
    for grant in sorted(GET_GRANTS):
        for entity, verb in GET_VERBS.get(grant, (tuple(grant.split(".")),)):
            subject = f"dsec.get.v1.{project}.{entity}.{verb}.{admin.principal}"
            await admin.nc.publish(subject, b"{}")
            wanted.append((f"{entity}.{verb}", project, admin.principal))
    await admin.nc.flush()
    stop = json.dumps({"request_id": ids.new(), "uids": [ids.new()]}).encode()
    await stack.bus.store([Outgoing(f"dsec.req.v1.{project}.sandbox.stop.audit", stop)])
    wanted.append(("sandbox.stop", project, "audit"))

    def ours() -> list[dict[str, Any]]:
        """Without those of what came before; a record of it may come as late as now."""
        nodes = [r for r in records.all if r["project"] == ROOT and r["verb"].startswith("node.")]
        return nodes + [r for r in records.all if r["project"] == project]

    async with asyncio.timeout(ACCESS_S):
        while len(ours()) < len(wanted):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # one too many would come about now
    found = [(r["verb"], r["project"], r["principal"]) for r in ours()]
    assert sorted(found) == sorted(wanted)
    assert all(r["id"] and r["at"] and r["outcome"] and r["sha256"] for r in ours())
    assert {r["outcome"] for r in ours()} > {"ok"}
    assert [r["outcome"] for r in ours() if r["principal"] == "audit"] == ["ok"]
    await listening.unsubscribe()
