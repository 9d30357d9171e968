"""Quotas over the chain of projects, and giving back what is over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

from sqlalchemy import text

from schemas.sandbox import Ended, EndedQuery
from schemas.subjects import rpc
from services.auth.app import App
from services.auth.reconcile import Reconciler
from shared import ids
from shared.bus import Bus, Incoming
from tests.integration.auth.conftest import (
    FAKE,
    MARKS,
    QUIET_S,
    Commands,
    Person,
    Stack,
    body,
    make_settings,
    new_project,
    over,
    ready,
    refusals,
    send,
    until_used,
    used,
)

pytestmark = MARKS


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


async def test_what_is_over_makes_room_before_its_event_is_heard(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    """A client that was told of an end asks again at once."""
    project = await new_project(admin, quota={"sandboxes": 1})
    first = body(FAKE)
    await send(admin, project, first)
    await commands.wait(project, 1)
    told: list[tuple[str, str]] = []

    async def ended(_query: EndedQuery, _: Incoming) -> Ended:
        return Ended(sandboxes=told)

    scheduler = Bus(stack.service("scheduler"), "scheduler")
    scheduler.answer(rpc("scheduler", "ended"), EndedQuery, ended)
    await scheduler.start()
    try:
        await send(admin, project, body(FAKE))
        (found,) = refusals((await commands.wait(project, 2))[1]).values()
        assert found["field"] == "quota.sandboxes"
        told.append((project, first["request_id"]))
        await send(admin, project, body(FAKE))
        assert refusals((await commands.wait(project, 3))[2]) == {}
    finally:
        await scheduler.close()
    await over(stack, project, first["request_id"], "stopped")
    await asyncio.sleep(QUIET_S)
    assert await used(stack, project) == (1, 500, 64)


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
    """Whatever the tests before did, rows and sums agree."""
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


async def test_a_charge_whose_event_was_lost_is_given_back(
    stack: Stack, admin: Person, commands: Commands
) -> None:
    project = await new_project(admin)
    request = body(FAKE, count=3)
    await send(admin, project, request)
    await commands.wait(project, 1)
    over_, alive, _ = (ids.item_uid(request["request_id"], i) for i in range(3))
    now = {"project": project, "generation": 1, "backend": "fake", "created_at": 0,
           "changed_at": 0}  # fmt: skip

    async def scheduler(message: Any) -> None:
        asked = json.loads(message.data)["uids"]
        found = [{"uid": u, "state": s, **now}
                 for u, s in ((over_, "failed"), (alive, "running")) if u in asked]  # fmt: skip
        await message.respond(json.dumps({"sandboxes": found}).encode())

    answering = await stack.bus.client.subscribe("dsec.rpc.v1.scheduler.sandboxes", cb=scheduler)
    await stack.bus.client.flush()
    settings = make_settings(stack.endpoints, stack.settings.pg_dsn, auth_charge_check_s=0.0)
    try:
        reconciler = Reconciler(settings, db=stack.db, bus=stack.bus)
        await reconciler.look()
        assert await used(stack, project) == (2, 1000, 128)
        settings.auth_charge_unknown_s = 0.0
        await reconciler.look()
        assert await used(stack, project) == (1, 500, 64)
    finally:
        await answering.unsubscribe()
    async with stack.db.transaction() as connection:
        left = await connection.execute(
            text("select uid from charge where project = :p"), {"p": project}
        )
        assert [row[0] for row in left] == [alive]
