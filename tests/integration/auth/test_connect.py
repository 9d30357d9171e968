"""Connecting: who is let in, and what the server then lets them do."""

from __future__ import annotations

import asyncio
import contextlib
import time

import nats.errors
import pytest

from services.auth import kick
from tests.integration.auth.conftest import (
    ANSWER_S,
    MARKS,
    ROOT,
    Stack,
    connect,
    new_key,
    new_project,
)  # fmt: skip

pytestmark = MARKS


async def test_a_key_connects_and_whoami_names_it(stack: Stack, admin) -> None:
    reply = await admin.read(ROOT, "whoami", "get")
    assert reply["principal"] == admin.principal
    assert reply["grants"] == ["*"]
    assert reply["project"]["id"] == ROOT


@pytest.mark.parametrize("token", ["", "nonsense", "dsec_" + "0" * 26 + "_" + "x" * 43])
async def test_a_bad_credential_is_refused_without_saying_why(stack: Stack, token: str) -> None:
    with pytest.raises(nats.errors.Error) as caught:
        await connect(stack, token, principal="0" * 26)
    assert "authorization violation" in str(caught.value).lower()


async def test_a_wrong_secret_of_a_real_principal_is_refused(stack: Stack) -> None:
    wrong = stack.secrets.admin_key[:-4] + "AAAA"
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
        await connect(stack, wrong)


async def test_a_foreign_projects_subject_is_refused_by_the_server(stack: Stack, admin) -> None:
    mine, foreign = await new_project(admin), await new_project(admin)
    key = await new_key(admin, mine, "sandbox.*")
    person = await connect(stack, key["secret"])
    await person.nc.publish(f"dsec.req.v1.{foreign}.sandbox.create", b"{}")
    await person.nc.subscribe(f"dsec.evt.v1.sandbox.{foreign}.>")
    await person.nc.subscribe("_INBOX.>")
    await person.nc.flush()
    await asyncio.sleep(0.1)
    said = " ".join(map(str, person.errors)).lower()
    assert said.count("permissions violation") == 3, said
    await person.nc.close()


async def test_a_principals_subject_is_its_own(stack: Stack, admin) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.*")
    person = await connect(stack, key["secret"])
    await person.nc.publish(f"dsec.req.v1.{project}.sandbox.stop.{admin.principal}", b"{}")
    await person.nc.flush()
    await asyncio.sleep(0.1)
    assert "permissions violation" in str(person.errors).lower()
    await person.nc.close()


async def test_a_node_speaks_only_under_its_own_name(stack: Stack) -> None:
    node = await connect(stack, stack.secrets.node_keys["n1"])
    heard = []

    async def hear(message) -> None:
        heard.append(message.subject)

    listening = await stack.bus.client.subscribe("dsec.hb.v1.*", cb=hear)
    await stack.bus.client.flush()
    await node.nc.publish("dsec.hb.v1.n1", b"{}")
    await node.nc.publish("dsec.hb.v1.n2", b"{}")
    await node.nc.publish("dsec.req.v1.root.sandbox.create", b"{}")
    await node.nc.subscribe("dsec.exec.v1.*.n1.>")
    await node.nc.flush()
    async with asyncio.timeout(ANSWER_S):
        while not heard:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)  # one too many would come about now
    assert heard == ["dsec.hb.v1.n1"]
    assert str(node.errors).lower().count("permissions violation") == 2
    await listening.unsubscribe()
    await node.nc.close()


async def test_revoking_a_key_ends_its_connection_and_its_use(stack: Stack, admin) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.list")
    person = await connect(stack, key["secret"])
    reply = await admin.change(project, "key", "delete", id=key["id"])
    assert reply["key"]["revoked"] is True
    async with asyncio.timeout(ANSWER_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.02)
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
        await connect(stack, key["secret"])
    assert admin.nc.is_connected


async def test_a_revoked_key_keeps_none_of_many_connections(
    stack: Stack, admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a server names at once."""
    monkeypatch.setattr(kick, "PAGE", 2)
    project = await new_project(admin)
    key = await new_key(admin, project, "sandbox.list")
    people = [await connect(stack, key["secret"]) for _ in range(5)]
    await admin.change(project, "key", "delete", id=key["id"])
    async with asyncio.timeout(ANSWER_S):
        while not all(person.nc.is_closed for person in people):
            await asyncio.sleep(0.02)
    assert admin.nc.is_connected


async def test_a_key_ends_in_time(stack: Stack, admin) -> None:
    project = await new_project(admin)
    for life_s in (4, 20, 60):  # one that is over before it was used shows nothing
        key = await new_key(admin, project, "sandbox.list", expires_in_s=life_s)
        with contextlib.suppress(nats.errors.Error):
            person = await connect(stack, key["secret"])
            break
    else:
        pytest.fail("no key lived until it was used")
    async with asyncio.timeout(ANSWER_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.05)
    await asyncio.sleep(max(0.0, key["expires_at"] - time.time()))  # JWTs end at full seconds
    with pytest.raises(nats.errors.Error, match=r"(?i)authorization violation"):
        await connect(stack, key["secret"])


async def test_whoever_changes_its_own_grants_hears_the_answer_first(
    stack: Stack, admin
) -> None:
    project = await new_project(admin)
    key = await new_key(admin, project, "project.create", "project.list", "sandbox.list")
    person = await connect(stack, key["secret"])
    child = await new_project(person, project)
    async with asyncio.timeout(ANSWER_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.02)
    again = await connect(stack, key["secret"])
    reply = await again.read(child, "project", "list")
    assert [p["id"] for p in reply["projects"]] == [child]
    await again.nc.close()
