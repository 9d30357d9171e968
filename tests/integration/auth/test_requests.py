"""Requests: admission, order, idempotency, bad input, access records."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from sqlalchemy import text

from shared import ids
from tests.integration.auth.conftest import (
    ANSWER_S,
    FAKE,
    MARKS,
    QUIET_S,
    ROOT,
    Commands,
    Person,
    Records,
    Stack,
    body,
    connect,
    new_key,
    new_project,
    refusals,
    send,
    used,
)

pytestmark = MARKS

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
        {**FAKE, "policy": {"files": {"hidden": ["x"]}}},
        {**FAKE, "policy": {"files": {"hide": ["/x"]}}},
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
        4: ("invalid_request", "policy.files.hidden[0]"),
        5: ("unsupported", "policy.files.hide"),
        6: ("invalid_request", "memory_request_mb"),
    }
    assert await used(stack, project) == (2, 1000, 128)


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


async def test_two_requests_that_name_one_uid_in_one_batch_share_nothing(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    first = body(FAKE, count=3)
    second = {"request_id": ids.item_uid(first["request_id"], 1), "specs": [FAKE]}
    subject = f"dsec.req.v1.{project}.sandbox.create.{admin.principal}"
    for request in (first, second):  # at once: they come as one batch, or as two
        await admin.nc.publish(subject, json.dumps(request).encode(), reply=admin.inbox)
    sent = {c["request_id"]: refusals(c) for c in await commands.wait(project, 2)}
    assert sent[first["request_id"]] == {}
    assert {i: e["code"] for i, e in sent[second["request_id"]].items()} == {0: "conflict"}
    assert await used(stack, project) == (3, 1500, 192)


@pytest.mark.parametrize(
    ("data", "code", "field"),
    [
        (b"this is not json", "invalid_request", None),
        (b"[" * 100_000, "invalid_request", None),
        (b'{"v": 9, "request_id": "x"}', "unsupported", "v"),
        (b'{"request_id": 12}', "invalid_request", "request_id"),
        (b'{"request_id": "%s"}', "invalid_request", "specs"),
        (b'{"request_id": "%s", "specs": []}', "invalid_request", "specs"),
        (b'{"request_id": "%s", "specs": [{}], "count": 0}', "invalid_request", "count"),
        (b'{"request_id": "%s", "specs": [{}, {}], "count": 2}', "invalid_request", "count"),
    ],
    ids=["text", "nested", "version", "number", "no-specs", "none", "count", "many"],
)  # fmt: skip
async def test_what_is_no_request_is_answered_and_the_service_goes_on(
    stack: Stack, admin: Person, commands: Commands, data: bytes, code: str, field: str | None
) -> None:
    fresh = data.replace(b"%s", ids.new().encode())
    reply = await admin.request(ROOT, "sandbox", "create", fresh)
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
        await stack.bus.client.flush()
        await stack.bus.client.request(
            subject, json.dumps(body(FAKE)).encode(), headers={"Dsec-Reply": inbox},
            timeout=ANSWER_S,
        )  # fmt: skip
        reply = json.loads((await answers.next_msg(timeout=ANSWER_S)).data)
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
            f"dsec.req.v1.{ROOT}.sandbox.create.{admin.principal}", b"not json", timeout=ANSWER_S,
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
            json.dumps(request).encode(), headers={"Dsec-Reply": inbox}, timeout=ANSWER_S,
        )  # fmt: skip
    subjects = (
        "dsec.cmd.v1.sandbox.op.", "dsec.cmd.v1.node.op.n1", f"dsec.cmd.v1.image.create.{project}",
        f"dsec.cmd.v1.image.delete.{project}",
    )  # fmt: skip

    def found() -> list[dict[str, Any]]:
        """One of each, whichever came first."""
        ours = [(s, m) for s, m in commands.messages if ".sandbox." not in s or uid in str(m)]
        return [m for wanted in subjects for s, m in ours if s.startswith(wanted)]

    async with asyncio.timeout(ANSWER_S):
        while len(found()) < len(subjects):
            await asyncio.sleep(0.02)
    op, node, create, delete = found()
    (command,) = op["commands"]
    assert (command["verb"], command["request"]["uids"], command["reply_to"]) == (
        "stop", [uid], inbox,
    )  # fmt: skip
    assert node["verb"] == "drain"
    assert (create["project"], create["create"]["name"]) == (project, "py:3.11")
    assert delete["delete"]["name"] == "py:3.11"


async def test_every_verb_has_one_access_record(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    """(O08)"""
    records = Records()
    subscription = await records.on(stack.bus.client)
    project = await new_project(admin)
    good, bad = body(FAKE), {"request_id": ids.new(), "specs": []}
    await send(admin, project, good)
    await admin.request(project, "sandbox", "create", bad)
    await admin.read(project, "quota", "get")
    await admin.read(project, "sandbox", "list")
    await admin.change(project, "key", "delete", id="none")
    await new_key(admin, project, "sandbox.list")

    def mine() -> list[tuple[str, str]]:
        ours = [r for r in records.all if r["project"] == project]
        return sorted(
            (r["verb"], r["outcome"]) for r in ours if r["principal"] == admin.principal
        )

    wanted = [
        ("key.create", "ok"), ("key.delete", "not_found"), ("quota.get", "ok"),
        ("sandbox.create", "invalid_request"), ("sandbox.create", "ok"),
        ("sandbox.list", "unavailable"),
    ]  # fmt: skip
    async with asyncio.timeout(ANSWER_S):
        while len(mine()) < len(wanted):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)  # one too many would come about now
    assert mine() == wanted
    assert len({r["id"] for r in records.all}) == len(records.all)
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




async def test_old_requests_are_forgotten_but_not_those_that_are_charged(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    charged, over = body(FAKE), body(FAKE)
    for request in (charged, over):
        await send(admin, project, request)
    await commands.wait(project, 2)
    both = [charged["request_id"], over["request_id"]]
    async with stack.db.transaction() as connection:
        await connection.execute(
            text("update request set at = now() - make_interval(secs => :s) where id = any(:ids)"),
            {"s": stack.settings.auth_request_keep_s + 1, "ids": both},
        )
        await connection.execute(
            text("delete from charge where request = :id"), {"id": over["request_id"]}
        )
    assert await stack.app.prune() >= 1
    async with stack.db.transaction() as connection:
        found = await connection.execute(
            text("select id from request where id = any(:ids)"), {"ids": both}
        )
        assert [row[0] for row in found] == [charged["request_id"]]
