"""Projects, keys, grants and quotas: one model, bounded delegation."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import nats.errors
import pytest

from shared import ids
from tests.integration.auth.conftest import (
    ANSWER_S,
    MARKS,
    ROOT,
    Person,
    Stack,
    connect,
    new_key,
    new_project,
)  # fmt: skip

pytestmark = MARKS


def error(reply: dict[str, Any]) -> tuple[str, str | None]:
    assert "error" in reply, reply
    return reply["error"]["code"], reply["error"].get("field")


async def manager(stack: Stack, admin: Person, project: str, *grants: str) -> Person:
    key = await new_key(admin, project, *grants)
    return await connect(stack, key["secret"])


async def test_projects_nest_to_any_depth_and_grants_reach_down(
    stack: Stack, admin: Person
) -> None:
    top = await new_project(admin)
    key = await new_key(admin, top, "project.create", "project.list", "sandbox.create")
    names = [top]
    for _ in range(6):
        person = await connect(stack, key["secret"])
        names.append(await new_project(person, names[-1]))
        await person.nc.close()
    person = await connect(stack, key["secret"])
    reply = await person.read(names[-1], "project", "list")
    (project,) = reply["projects"]
    assert project["path"] == [ROOT, *names]
    below = await person.read(top, "project", "list")
    assert {p["id"] for p in below["projects"]} == set(names)
    await person.nc.close()


async def test_nobody_grants_what_it_does_not_hold(stack: Stack, admin: Person) -> None:
    project = await new_project(admin)
    person = await manager(stack, admin, project, "key.create", "grant.create", "sandbox.list")
    for grants in (["sandbox.create"], ["sandbox.*"], ["*"], ["sandbox.list", "audit.read"]):
        reply = await person.change(project, "key", "create", name="x", grants=grants)
        assert error(reply) == ("forbidden", "grants")
        reply = await person.change(
            project, "grant", "create", principal=person.principal, grants=grants
        )
        assert error(reply) == ("forbidden", "grants")
    strange = await person.change(project, "key", "create", name="x", grants=["sandbox.fly"])
    assert error(strange) == ("invalid_request", "grants")
    held = await person.change(project, "key", "create", name="x", grants=["sandbox.list"])
    assert held["key"]["grants"] == ["sandbox.list"]
    await person.nc.close()


async def test_a_manager_reaches_neither_up_nor_aside(stack: Stack, admin: Person) -> None:
    top, aside = await new_project(admin), await new_project(admin)
    mine = await new_project(admin, top)
    person = await manager(stack, admin, mine, "*")
    foreign = await new_key(admin, aside, "sandbox.list")
    for body in ({"id": top}, {"id": aside}):
        assert error(await person.change(mine, "project", "delete", **body)) == (
            "not_found", "id",
        )  # fmt: skip
    assert error(await person.change(mine, "key", "delete", id=foreign["id"])) == (
        "not_found", "id",
    )  # fmt: skip
    reply = await person.change(mine, "quota", "create", project=aside, limits={"sandboxes": 1})
    assert error(reply) == ("not_found", "project")
    await person.nc.publish(f"dsec.req.v1.{top}.key.create.{person.principal}", b"{}")
    await person.nc.flush()
    await asyncio.sleep(0.1)
    assert "permissions violation" in str(person.errors).lower()
    await person.nc.close()


async def test_only_the_root_makes_keys_of_nodes_and_services(
    stack: Stack, admin: Person
) -> None:
    project = await new_project(admin)
    person = await manager(stack, admin, project, "*")
    for more in ({"kind": "node", "node": "n9"}, {"kind": "service"}):
        reply = await person.change(project, "key", "create", name="x", **more)
        assert error(reply) == ("forbidden", "kind")
    name = f"n-{ids.new()[-8:]}"
    key = await new_key(admin, ROOT, kind="node", node=name)
    node = await connect(stack, key["secret"])
    await node.nc.publish(f"dsec.hb.v1.{name}", b"{}")
    await node.nc.flush()
    assert node.errors == []
    await node.nc.close()
    again = await admin.change(ROOT, "key", "create", name="x", kind="node", node=name)
    assert error(again) == ("conflict", "node")
    for more, field in (({"kind": "node"}, "node"), ({"node": "n8"}, "node")):
        assert error(await admin.change(ROOT, "key", "create", name="x", **more)) == (
            "invalid_request", field,
        )  # fmt: skip
    await person.nc.close()


async def test_a_childs_quota_stays_within_its_ancestors(stack: Stack, admin: Person) -> None:
    top = await new_project(admin, quota={"sandboxes": 10, "memory_mb": 1000})
    mid = await new_project(admin, top)
    reply = await admin.change(
        mid, "project", "create", name="x", quota={"sandboxes": 11}
    )
    assert error(reply) == ("quota_exceeded", "quota.sandboxes")
    low = await new_project(admin, mid, quota={"sandboxes": 10})
    reply = await admin.change(mid, "quota", "create", project=low, limits={"memory_mb": 2000})
    assert error(reply) == ("quota_exceeded", "limits.memory_mb")
    reply = await admin.change(mid, "quota", "create", project=low, limits={"cores": 2.5})
    assert reply["quota"]["limit"] == {"cores": 2.5}
    read = await admin.read(low, "quota", "get")
    assert read["quota"]["limit"] == {"cores": 2.5}


async def test_ones_own_quota_is_set_from_above(stack: Stack, admin: Person) -> None:
    top = await new_project(admin)
    low = await new_project(admin, top)
    person = await manager(stack, admin, top, "quota.create", "quota.get")
    assert error(await person.change(top, "quota", "create", limits={"sandboxes": 5})) == (
        "forbidden", "project",
    )  # fmt: skip
    reply = await person.change(top, "quota", "create", project=low, limits={"sandboxes": 5})
    assert reply["quota"]["limit"] == {"sandboxes": 5}
    await person.nc.close()


async def test_a_key_does_not_outlive_its_makers(stack: Stack, admin: Person) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "key.create", expires_in_s=60)
    person = await connect(stack, key["secret"])
    reply = await person.change(project, "key", "create", name="x", expires_in_s=3600)
    assert error(reply) == ("forbidden", "expires_in_s")
    made = await person.change(project, "key", "create", name="x")
    assert made["key"]["expires_at"] == pytest.approx(key["expires_at"])
    await person.nc.close()


async def test_a_repeated_key_request_shows_the_same_secret(stack: Stack, admin: Person) -> None:
    project = await new_project(admin)
    request = {"request_id": ids.new(), "name": "x", "grants": ["sandbox.list"]}
    first = await admin.request(project, "key", "create", request)
    again = await admin.request(project, "key", "create", request)
    assert first == again
    assert first["key"]["secret"].startswith(f"dsec_{first['key']['principal']}_")
    other = await admin.request(project, "key", "create", {**request, "name": "y"})
    assert error(other) == ("conflict", "request_id")
    listed = await admin.read(project, "key", "list")
    assert [k["id"] for k in listed["keys"]] == [first["key"]["id"]]
    assert "secret" not in listed["keys"][0]


async def test_given_grants_work_after_the_reconnect_and_can_be_taken_back(
    stack: Stack, admin: Person
) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.list")
    person = await connect(stack, key["secret"])
    reply = await admin.change(
        project, "grant", "create", principal=key["principal"], grants=["quota.get"]
    )
    assert reply["grants"] == ["quota.get", "sandbox.list"]
    async with asyncio.timeout(ANSWER_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.02)
    person = await connect(stack, key["secret"])
    assert "quota" in await person.read(project, "quota", "get")
    seen = await admin.read(project, "grant", "list", principal=key["principal"])
    assert seen["grants"] == ["quota.get", "sandbox.list"]
    await admin.change(
        project, "grant", "delete", principal=key["principal"], grants=["quota.get"]
    )
    async with asyncio.timeout(ANSWER_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.02)
    gone = await admin.change(
        project, "grant", "delete", principal=key["principal"], grants=["quota.get"]
    )
    assert error(gone) == ("not_found", "grants")


async def test_only_an_empty_project_is_deleted_and_its_keys_go_with_it(
    stack: Stack, admin: Person
) -> None:
    project = await new_project(admin)
    child = await new_project(admin, project)
    key = await new_key(admin, child, "sandbox.list")
    assert error(await admin.change(ROOT, "project", "delete", id=project)) == ("conflict", "id")
    assert error(await admin.change(ROOT, "project", "delete", id=ROOT)) == ("forbidden", "id")
    assert "error" not in await admin.change(ROOT, "project", "delete", id=child)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
        await connect(stack, key["secret"])
    assert "error" not in await admin.change(ROOT, "project", "delete", id=project)


async def test_a_taken_project_id_is_a_conflict_and_a_name_is_made_unique(
    stack: Stack, admin: Person
) -> None:
    project = await new_project(admin)
    taken = await admin.change(ROOT, "project", "create", name="x", id=project)
    assert error(taken) == ("conflict", "id")
    first = await admin.change(project, "project", "create", name="My Team!")
    again = await admin.change(project, "project", "create", name="My Team!")
    assert first["project"]["id"] == "my-team"
    assert again["project"]["id"].startswith("my-team-")


async def test_changes_of_identity_need_a_name(stack: Stack, admin: Person) -> None:
    reply = await admin.request(
        ROOT, "project", "create", {"request_id": "r", "name": "x"}, anonymous=True
    )
    assert error(reply) == ("unauthenticated", "principal")


@pytest.mark.parametrize(
    ("entity", "verb", "body", "code", "field"),
    [
        ("project", "create", b"nope", "invalid_request", None),
        ("project", "create", b'{"request_id": "a"}', "invalid_request", "name"),
        ("project", "create", b'{"request_id": "a", "name": "x", "v": 2}', "unsupported", "v"),
        ("project", "create", b'{"request_id": "", "name": "x"}', "invalid_request",
         "request_id"),
        ("project", "create", b'{"request_id": "a", "name": "x", "id": "A.B"}',
         "invalid_request", "id"),
        ("quota", "create", b'{"request_id": "a", "limits": {"cores": -1}}',
         "invalid_request", "limits.cores"),
        ("key", "create", b'{"request_id": "a", "name": "x", "kind": "robot"}',
         "invalid_request", "kind"),
    ],
)  # fmt: skip
async def test_bad_changes_name_their_field(
    stack: Stack, admin: Person, entity: str, verb: str, body: bytes, code: str,
    field: str | None,
) -> None:  # fmt: skip
    assert error(await admin.request(ROOT, entity, verb, body)) == (code, field)


async def test_reads_are_forwarded_with_their_scope(stack: Stack, admin: Person) -> None:
    """Other services are asked for what the subject covers, whatever the body says."""
    top = await new_project(admin)
    low = await new_project(admin, top)
    asked: dict[str, dict[str, Any]] = {}

    async def answer(message: Any) -> None:
        asked[message.subject] = json.loads(message.data)
        await message.respond(b'{"fine": 1}')

    subscription = await stack.bus.client.subscribe("dsec.rpc.v1.*.*", cb=answer)
    await stack.bus.client.flush()
    for entity, query in (
        ("sandbox", {"project": ROOT, "job": "j"}),
        ("image", {"projects": [ROOT], "name": "n"}),
        ("audit", {"projects": [ROOT]}),
        ("node", {}),
    ):
        reply = await admin.nc.request(
            f"dsec.get.v1.{top}.{entity}.list.{admin.principal}", json.dumps(query).encode(),
            timeout=ANSWER_S,
        )  # fmt: skip
        assert json.loads(reply.data) == {"fine": 1}
    await subscription.unsubscribe()
    assert asked["dsec.rpc.v1.scheduler.sandboxes"] == {"project": top, "job": "j"}
    assert asked["dsec.rpc.v1.imagesvc.images"] == {"projects": [top, ROOT], "name": "n"}
    assert sorted(asked["dsec.rpc.v1.audit.list"]["projects"]) == sorted([top, low])
    assert "dsec.rpc.v1.scheduler.nodes" in asked


@pytest.mark.parametrize(
    ("entity", "verb", "query", "code", "field"),
    [
        ("sandbox", "list", b"{", "invalid_request", None),
        ("sandbox", "list", b'{"limit": 0}', "invalid_request", "limit"),
        ("sandbox", "list", b"{}", "unavailable", None),
        ("project", "list", b'{"project": "nowhere"}', "not_found", "project"),
        ("audit", "list", b'{"project": "nowhere"}', "not_found", "project"),
    ],
)
async def test_bad_reads_are_typed_errors(
    stack: Stack, admin: Person, entity: str, verb: str, query: bytes, code: str,
    field: str | None,
) -> None:  # fmt: skip
    reply = await admin.nc.request(
        f"dsec.get.v1.{ROOT}.{entity}.{verb}.{admin.principal}", query, timeout=ANSWER_S
    )
    assert error(json.loads(reply.data)) == (code, field)
