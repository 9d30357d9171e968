"""Requests: admission, quotas over the chain, idempotency, bad input, releases."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import text

from schemas.base import encode
from schemas.sandbox import SandboxEvent
from schemas.subjects import evt_sandbox
from services.auth.app import App
from shared import ids
from shared.bus import Outgoing
from tests.integration.auth.conftest import (
    MARKS, ROOT, Commands, Person, Stack, connect, make_settings, new_key, new_project, ready,
    used,
)  # fmt: skip

pytestmark = MARKS

FAKE = {"backend": "fake", "cpu_cores_limit": 0.5, "memory_limit_mb": 64}
QUIET_S = 0.4
"""Long enough for something that must not happen."""


def body(*specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request_id": ids.new(), "specs": list(specs), **more}


async def send(person: Person, project: str, request: Any, *, anonymous: bool = False) -> None:
    """Publishes a create and waits for the stream's acknowledgement."""
    subject = f"dsec.req.v1.{project}.sandbox.create"
    if not anonymous:
        subject += f".{person.principal}"
    await person.nc.request(subject, json.dumps(request).encode(), timeout=3)


def refusals(command: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Errors of a create command's items by index."""
    return {i[1]: i[3] for i in command["items"] if len(i) > 3 and i[3] is not None}


async def over(stack: Stack, project: str, uid: str, state: str = "stopped") -> None:
    """What the scheduler says when a sandbox is over."""
    event = SandboxEvent(uid=uid, project=project, state=state, generation=1, at=0.0)
    await stack.bus.store([Outgoing(evt_sandbox(project, state, uid), encode(event))])


async def until_used(stack: Stack, project: str, amounts: tuple[int, int, int]) -> None:
    async with asyncio.timeout(5):
        while await used(stack, project) != amounts:
            await asyncio.sleep(0.02)


async def test_an_admitted_create_goes_to_the_scheduler_and_is_charged_up_the_chain(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    parent = await new_project(admin)
    child = await new_project(admin, parent)
    request = body(FAKE, count=3)
    await send(admin, child, request)
    (command,) = await commands.wait(child, 1)
    assert [i[0] for i in command["items"]] == [
        ids.item_uid(request["request_id"], i) for i in range(3)
    ]
    assert (command["principal"], command["total"]) == (admin.principal, 3)
    assert len(command["specs"]) == 1
    for project in (parent, child):
        assert await used(stack, project) == (3, 1500, 192)


async def test_without_an_sdk_the_request_is_anonymous(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    await send(admin, project, body(FAKE), anonymous=True)
    (command,) = await commands.wait(project, 1)
    assert command["principal"] == "anonymous"


async def test_bad_items_get_their_own_error_and_the_others_run(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    specs = [
        FAKE,
        {**FAKE, "memory_limit_mb": -1},
        {"backend": "container"},
        {**FAKE, "mounts": ["/var/run/docker.sock"]},
        {**FAKE, "require": ["files.hidden"]},
        {**FAKE, "policy": {"files": {"hidden": ["/x"]}}},
        {**FAKE, "memory_request_mb": 128},
        FAKE,
    ]
    await send(admin, project, body(*specs))
    (command,) = await commands.wait(project, 1)
    found = {i: (e["code"], e["field"]) for i, e in refusals(command).items()}
    assert found == {
        1: ("invalid_request", "memory_limit_mb"),
        2: ("invalid_request", "container_image"),
        3: ("unsupported", "mounts"),
        4: ("unsupported", "require"),
        5: ("unsupported", "policy.files.hidden"),
        6: ("invalid_request", "memory_request_mb"),
    }
    assert await used(stack, project) == (2, 1000, 128)


async def test_the_first_that_fit_are_admitted_and_the_full_project_is_named(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    parent = await new_project(admin, quota={"sandboxes": 4})
    child = await new_project(admin, parent, quota={"memory_mb": 1000})
    await send(admin, child, body(FAKE, count=6))
    (command,) = await commands.wait(child, 1)
    found = refusals(command)
    assert sorted(found) == [4, 5]
    assert (found[4]["code"], found[4]["field"]) == ("quota_exceeded", "quota.sandboxes")
    assert found[4]["details"]["project"] == parent
    assert await used(stack, child) == await used(stack, parent) == (4, 2000, 256)


async def test_the_creation_rate_is_a_limit_of_its_own(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin, quota={"creations_per_s": 2})
    await send(admin, project, body(FAKE, count=5))
    (command,) = await commands.wait(project, 1)
    found = refusals(command)
    assert sorted(found) == [2, 3, 4]
    assert found[2]["field"] == "quota.creations_per_s"
    assert 0 < found[2]["retry_after_s"] <= 0.5
    await asyncio.sleep(0.6)
    await send(admin, project, body(FAKE))
    assert refusals((await commands.wait(project, 2))[1]) == {}


async def test_ten_times_the_same_request_is_charged_once(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    request = body(FAKE, count=2)
    await asyncio.gather(*(send(admin, project, request) for _ in range(10)))
    sent = await commands.wait(project, 10)
    assert all(c["items"] == sent[0]["items"] for c in sent)
    assert await used(stack, project) == (2, 1000, 128)


async def test_a_repeated_request_is_told_the_same_refusals(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin, quota={"sandboxes": 1})
    request = body(FAKE, count=2)
    await send(admin, project, request)
    await commands.wait(project, 1)
    await admin.change(ROOT, "quota", "create", project=project, limits={"sandboxes": 9})
    await send(admin, project, request)
    first, again = await commands.wait(project, 2)
    assert refusals(first) == refusals(again)
    assert await used(stack, project) == (1, 500, 64)


async def test_the_same_id_with_other_content_is_a_conflict(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project, other = await new_project(admin), await new_project(admin)
    request = body(FAKE)
    await send(admin, project, request)
    await commands.wait(project, 1)
    for where, what in (
        (project, {**request, "specs": [{"backend": "fake"}]}),
        (other, request),
    ):
        reply = await admin.request(where, "sandbox", "create", what)
        assert (reply["error"]["code"], reply["error"]["field"]) == ("conflict", "request_id")
    assert await used(stack, other) == (0, 0, 0)


async def test_a_uid_of_another_request_is_not_taken_over(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project, thief = await new_project(admin), await new_project(admin)
    request = body(FAKE, count=2)
    await send(admin, project, request)
    await commands.wait(project, 1)
    stolen = ids.item_uid(request["request_id"], 1)
    await send(admin, thief, {"request_id": stolen, "specs": [FAKE], "count": 2})
    (command,) = await commands.wait(thief, 1)
    assert {i: e["code"] for i, e in refusals(command).items()} == {0: "conflict"}
    assert await used(stack, thief) == (1, 500, 64)
    assert await used(stack, project) == (2, 1000, 128)


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (b"this is not json", "invalid_request", None),
        (b"[" * 100_000, "invalid_request", None),
        (b'{"v": 9, "request_id": "x"}', "unsupported", "v"),
        (b'{"request_id": 12}', "invalid_request", "request_id"),
        (b'{"request_id": "%s"}' % ids.new().encode(), "invalid_request", "specs"),
        (b'{"request_id": "%s", "specs": []}' % ids.new().encode(), "invalid_request", "specs"),
        (b'{"request_id": "%s", "specs": [{}], "count": 0}' % ids.new().encode(),
         "invalid_request", "count"),
        (b'{"request_id": "%s", "specs": [{}, {}], "count": 2}' % ids.new().encode(),
         "invalid_request", "count"),
    ],
)  # fmt: skip
async def test_what_is_no_request_is_answered_and_the_service_goes_on(
    stack: Stack, admin: Person, commands: Commands, data: bytes, code: str, field: str | None
) -> None:
    reply = await admin.request(ROOT, "sandbox", "create", data)
    assert (reply["error"]["code"], reply["error"].get("field")) == (code, field)
    project = await new_project(admin)
    await send(admin, project, body(FAKE))
    assert len(await commands.wait(project, 1)) == 1


async def test_a_request_over_the_limit_names_the_payload(stack: Stack, admin: Person) -> None:
    huge = body({**FAKE, "env": {"X": "v" * (7 * 1024 * 1024 + 1)}})
    reply = await admin.request(ROOT, "sandbox", "create", huge)
    assert (reply["error"]["code"], reply["error"]["field"]) == ("invalid_request", "payload")


async def test_unknown_verbs_and_projects_are_typed_errors(stack: Stack, admin: Person) -> None:
    # the service's own user may publish what no client can
    for subject, code, field in (
        ("dsec.req.v1.root.sandbox.explode", "unsupported", "verb"),
        ("dsec.req.v1.nowhere.sandbox.create", "not_found", "project"),
    ):
        inbox = f"_INBOX.{ids.new()}.x"
        answers = await stack.bus.client.subscribe(inbox)
        await stack.bus.client.request(
            subject, json.dumps(body(FAKE)).encode(), headers={"Dsec-Reply": inbox}, timeout=3
        )
        reply = json.loads((await answers.next_msg(timeout=5)).data)
        assert (reply["error"]["code"], reply["error"]["field"]) == (code, field)
        await answers.unsubscribe()


async def test_answers_go_nowhere_but_to_the_clients_inbox(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    victim = f"_INBOX.{ids.new()}.x"
    heard = await stack.bus.client.subscribe("dsec.cmd.v1.node.op.*")
    others = await stack.bus.client.subscribe(victim)
    await stack.bus.client.flush()
    for target in ("dsec.cmd.v1.node.op.n1", victim):
        await admin.nc.request(
            f"dsec.req.v1.{ROOT}.sandbox.create.{admin.principal}", b"not json", timeout=3,
            headers={"Dsec-Reply": target},
        )  # fmt: skip
        await admin.nc.publish(
            f"dsec.get.v1.{ROOT}.whoami.get.{admin.principal}", b"{}", reply=target
        )
    await asyncio.sleep(QUIET_S)
    assert heard.pending_msgs == others.pending_msgs == 0
    await heard.unsubscribe()
    await others.unsubscribe()


async def test_operations_nodes_and_images_go_on(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    uid = ids.new()
    inbox = f"{admin.inbox}.ops"
    for entity, verb, request in (
        ("sandbox", "stop", {"request_id": ids.new(), "uids": [uid], "grace_s": 2}),
        ("node", "drain", {"request_id": "r1", "node": "n1"}),
        ("image", "create", {"request_id": "r2", "name": "py:3.11", "docker": "python"}),
        ("image", "delete", {"request_id": "r3", "name": "py:3.11"}),
    ):
        await admin.nc.request(
            f"dsec.req.v1.{project}.{entity}.{verb}.{admin.principal}",
            json.dumps(request).encode(), headers={"Dsec-Reply": inbox}, timeout=3,
        )  # fmt: skip
    async with asyncio.timeout(5):
        while len(commands.messages) < 4:
            await asyncio.sleep(0.02)
    (_, op), (node_subject, node), (create_subject, create), (_, delete) = commands.messages[:4]
    (command,) = op["commands"]
    assert (command["verb"], command["request"]["uids"], command["reply_to"]) == (
        "stop", [uid], inbox,
    )  # fmt: skip
    assert (node_subject, node["verb"]) == ("dsec.cmd.v1.node.op.n1", "drain")
    assert create_subject == f"dsec.cmd.v1.image.create.{project}"
    assert (create["project"], create["create"]["name"]) == (project, "py:3.11")
    assert delete["delete"]["name"] == "py:3.11"


async def test_each_terminal_state_gives_back_once(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    parent = await new_project(admin)
    project = await new_project(admin, parent, quota={"sandboxes": 4})
    request = body(FAKE, count=4)
    await send(admin, project, request)
    await commands.wait(project, 1)
    uids = [ids.item_uid(request["request_id"], i) for i in range(4)]
    states = ("stopped", "failed", "rejected", "lost")
    for uid, state in zip(uids, states, strict=True):
        await over(stack, project, uid, state)
        await over(stack, project, uid, state)
    await until_used(stack, project, (0, 0, 0))
    assert await used(stack, parent) == (0, 0, 0)
    await send(admin, project, body(FAKE, count=4))
    assert refusals((await commands.wait(project, 2))[1]) == {}
    await asyncio.sleep(QUIET_S)
    assert await used(stack, parent) == (4, 2000, 256)


async def test_a_rejected_create_frees_its_place_in_the_same_step(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    """(B15)"""
    project = await new_project(admin, quota={"sandboxes": 1})
    for n in range(1, 4):
        request = body(FAKE)
        await send(admin, project, request)
        command = (await commands.wait(project, n))[n - 1]
        assert refusals(command) == {}
        await over(stack, project, request["request_id"], "rejected")
        await until_used(stack, project, (0, 0, 0))


async def test_two_instances_at_once_never_overfill_a_chain(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    parent = await new_project(admin, quota={"sandboxes": 37})
    left, right = await new_project(admin, parent), await new_project(admin, parent)
    settings = make_settings(stack.endpoints, stack.settings.pg_dsn)
    second = App(settings)
    await second.start()
    try:
        await ready(second)
        before = second.requests.handled
        requests = [(p, body(FAKE, FAKE)) for _ in range(40) for p in (left, right)]
        await asyncio.gather(*(send(admin, p, r) for p, r in requests for _ in range(2)))
        admitted: Counter[str] = Counter()
        seen: dict[str, dict[str, Any]] = {}
        for project in (left, right):
            for command in await commands.wait(project, 80):
                known = seen.setdefault(command["request_id"], command)
                assert refusals(known).keys() == refusals(command).keys()
        for command in seen.values():
            admitted[command["project"]] += command["total"] - len(refusals(command))
        assert sum(admitted.values()) == 37
        assert second.requests.handled > before, "the second instance took part"
    finally:
        await second.close()
    assert (await used(stack, parent))[0] == 37
    for project in (left, right):
        assert (await used(stack, project))[0] == admitted[project]


async def test_use_is_the_sum_of_the_charges(stack: Stack, admin: Person) -> None:
    """Runs last: whatever the tests before did, rows and sums agree."""
    async with stack.db.transaction() as connection:
        sums = await connection.execute(
            text(
                "select u.project, u.sandboxes, u.millicores, u.memory_mb, count(c.uid), "
                "coalesce(sum(c.millicores), 0)::bigint, coalesce(sum(c.memory_mb), 0)::bigint "
                "from usage u left join (select c.*, p.path from charge c "
                "join project p on p.id = c.project) c on u.project = any(c.path) "
                "group by u.project"
            )
        )
        for project, *amounts in sums:
            assert amounts[:3] == amounts[3:], project


async def test_every_verb_has_one_access_record(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    """(O08)"""
    records: list[dict[str, Any]] = []

    async def hear(message: Any) -> None:
        records.extend(json.loads(message.data)["records"])

    subscription = await stack.bus.client.subscribe("dsec.evt.v1.auth.access.*", cb=hear)
    await stack.bus.client.flush()
    project = await new_project(admin)
    good, bad = body(FAKE), {"request_id": ids.new(), "specs": []}
    await send(admin, project, good)
    await admin.request(project, "sandbox", "create", bad)
    await admin.read(project, "quota", "get")
    await admin.read(project, "sandbox", "list")
    await admin.change(project, "key", "delete", id="none")
    await new_key(admin, project, "sandbox.list")
    await asyncio.sleep(0.8)
    mine = [
        (r["verb"], r["outcome"]) for r in records
        if r["project"] == project and r["principal"] == admin.principal
    ]  # fmt: skip
    assert sorted(mine) == [
        ("key.create", "ok"), ("key.delete", "not_found"), ("quota.get", "ok"),
        ("sandbox.create", "invalid_request"), ("sandbox.create", "ok"),
        ("sandbox.list", "unavailable"),
    ]  # fmt: skip
    assert len({r["id"] for r in records}) == len(records)
    await subscription.unsubscribe()


async def test_secrets_are_neither_stored_nor_told(stack: Stack, admin: Person) -> None:
    """(S07)"""
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.list")
    secret = key["secret"].split("_", 2)[2]
    person = await connect(stack, key["secret"])
    await person.nc.close()
    async with stack.db.transaction() as connection:
        tables = await connection.execute(
            text("select table_name from information_schema.tables where table_schema = 'auth'")
        )
        for (table,) in tables.all():
            rows = await connection.execute(text(f'select t::text from "{table}" t'))
            assert not any(secret in str(row[0]) for row in rows), table
            hexed = await connection.execute(text(f'select t::text from "{table}" t'))
            assert not any(secret.encode().hex() in str(row[0]) for row in hexed), table
