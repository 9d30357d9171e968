"""Named policies: versions, what a name means, what a create gets of it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.auth.conftest import (
    FAKE,
    MARKS,
    Commands,
    Person,
    Stack,
    body,
    connect,
    new_key,
    new_project,
    refusals,
    send,
)

pytestmark = MARKS

OPEN: dict[str, Any] = {"network": {"pypi": True}}
SHUT: dict[str, Any] = {"preset": "locked", "require": ["processes"]}


async def named(person: Person, project: str, name: str, document: dict[str, Any]) -> int:
    reply = await person.change(project, "policy", "create", name=name, document=document)
    return int(reply["policy"]["version"])


async def spec_of(
    person: Person, commands: Commands, project: str, count: int, **spec: Any
) -> dict[str, Any]:
    """What the scheduler is sent; ``count`` are the project's creates so far."""
    await send(person, project, body({**FAKE, **spec}))
    command = (await commands.wait(project, count))[-1]
    return dict(command["specs"][0]) if command["specs"] else {"refused": refusals(command)}


async def test_a_name_means_its_newest_version_or_the_one_that_is_named(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    assert await named(admin, project, "strict", OPEN) == 1
    assert await named(admin, project, "strict", OPEN) == 1
    assert await named(admin, project, "strict", SHUT) == 2
    made = await spec_of(admin, commands, project, 1, policy_name="strict")
    assert (made["policy"], made["policy_name"]) == (SHUT, "strict:2")
    assert made["require"] == ["processes"]
    made = await spec_of(admin, commands, project, 2, policy_name="strict:1")
    assert (made["policy"], made["policy_name"]) == (OPEN, "strict:1")
    found = await admin.read(project, "policy", "get", policy="strict:1")
    assert found["policy"]["document"] == OPEN
    listed, *presets = (await admin.read(project, "policy", "list"))["policies"]
    assert (listed["name"], listed["version"], "document" in listed) == ("strict", 2, False)
    assert {each["name"] for each in presets} == {"locked", "research", "build"}


async def test_a_presets_name_means_the_preset_unless_the_project_has_its_own(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    made = await spec_of(admin, commands, project, 1, policy_name="locked")
    assert (made["policy"], made["policy_name"]) == ({"preset": "locked"}, "locked:1")
    found = await admin.read(project, "policy", "get", policy="locked")
    assert found["policy"]["document"] == {"preset": "locked"}
    assert await named(admin, project, "locked", OPEN) == 1
    made = await spec_of(admin, commands, project, 2, policy_name="locked")
    assert made["policy"] == OPEN
    names = [p["name"] for p in (await admin.read(project, "policy", "list"))["policies"]]
    assert sorted(names) == ["build", "locked", "research"]


async def test_projects_see_those_above_and_the_nearest_counts(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    parent = await new_project(admin)
    child = await new_project(admin, parent)
    await named(admin, parent, "shared", SHUT)
    made = await spec_of(admin, commands, child, 1, policy_name="shared")
    assert made["policy"] == SHUT
    await named(admin, child, "shared", OPEN)
    made = await spec_of(admin, commands, child, 2, policy_name="shared")
    assert made["policy"] == OPEN
    found = await admin.read(parent, "policy", "get", policy="shared")
    assert found["policy"]["document"] == SHUT


async def test_a_name_that_means_nothing_and_a_bad_document_are_refused_by_field(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    await named(admin, project, "open", OPEN)
    for number, spec in enumerate(
        ({"policy_name": "none"}, {"policy_name": "open:9"},
         {"policy_name": "open", "policy": OPEN}), 1,
    ):  # fmt: skip
        made = await spec_of(admin, commands, project, number, **spec)
        assert "refused" in made
    for document, field in (({"filez": {}}, "policy.filez"), ({"preset": "x"}, "policy.preset")):
        reply = await admin.change(project, "policy", "create", name="bad", document=document)
        assert reply["error"]["field"] == field
    await admin.change(project, "policy", "delete", name="open")
    assert "refused" in await spec_of(admin, commands, project, 4, policy_name="open")
    reply = await admin.change(project, "policy", "delete", name="open")
    assert reply["error"]["code"] == "not_found"


async def test_who_may_create_sandboxes_changes_no_policy(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    await named(admin, project, "open", OPEN)
    key = await new_key(admin, project, "sandbox.create", "policy.get")
    person = await connect(stack, key["secret"])
    made = await spec_of(person, commands, project, 1, policy_name="open")
    assert made["policy"] == OPEN
    read = await person.read(project, "policy", "get", policy="open")
    assert read["policy"]["version"] == 1
    assert not person.errors
    await person.nc.publish(f"dsec.req.v1.{project}.policy.create.{person.principal}", b"{}")
    async with asyncio.timeout(60):
        while not person.errors:
            await asyncio.sleep(0.02)
    assert "permissions violation" in str(person.errors[0]).lower()
    await person.nc.close()
