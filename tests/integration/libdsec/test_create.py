"""Creating sandboxes over a real server: nothing lost, doubled or left behind."""

from __future__ import annotations

import asyncio
import json

import nats
import pytest

from libdsec import (
    Conflict,
    DeadlineExceeded,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    DSecRunArgs,
    Forbidden,
    InvalidRequest,
    NotFound,
    Sandbox,
    SandboxDied,
    Unauthenticated,
    Unavailable,
    _ids,
)
from tests.integration.libdsec.conftest import FAKE, until
from tests.integration.libdsec.peer import KEY, PRINCIPAL, PROJECT, Peer

pytestmark = pytest.mark.integration


async def test_a_sandbox_is_created_found_listed_and_stopped(peer: Peer, client: DSecClient):
    args = DSecRunArgs(backend="fake", labels={"task": "t1"}, memory_limit_mb=(64, 128))
    sandbox = await client.create(args, timeout=60)
    assert sandbox.state == "running"
    assert sandbox.id == f"n1-{sandbox.uid}"
    assert (await client.get(sandbox.id)).labels == {"task": "t1"}
    assert [s.id async for s in client.list(labels={"task": "t1"})] == [sandbox.id]
    assert [s.id async for s in client.list(labels={"task": "t2"})] == []
    info = await sandbox.info()
    assert (info.limits["memory_limit_mb"], info.usage) == (128, {"execs": 1.0})
    await sandbox.stop()
    await sandbox.stop()
    assert (await sandbox.info()).state == "stopped"
    assert peer.verbs == ["create", "stop"]


async def test_a_batch_keeps_its_order_and_a_bad_item_gets_its_own_error(client: DSecClient):
    bad = DSecContainerRunArgs(container_image="missing:1")
    results = await client.create_many([FAKE, bad, FAKE], timeout=60)
    assert [isinstance(r, Sandbox) for r in results] == [True, False, True]
    assert isinstance(results[1], NotFound)
    assert results[1].field == "container_image"
    many = await client.create_many(FAKE, n=2_500, timeout=60)
    assert len({s.id for s in many}) == 2_500
    outcome = await client.stop_many(many)
    assert set(outcome.values()) == {"stopped"}


async def test_the_same_request_is_the_same_sandbox(peer: Peer, client: DSecClient):
    """(L03)"""
    key = _ids.new()
    first = await client.create(FAKE, request_id=key, timeout=60)
    many = await asyncio.gather(
        *(client.create(FAKE, request_id=key, timeout=60) for _ in range(10))
    )
    assert {s.id for s in many} == {first.id}
    assert len(peer.rows) == 1
    with pytest.raises(Conflict) as caught:
        other = DSecRunArgs(backend="fake", pids_limit=100)
        await client.create(other, request_id=key, timeout=60)
    assert caught.value.field == "request_id"
    assert peer.live() == [first.uid]


async def test_a_lost_answer_is_healed_by_reading(peer: Peer, client: DSecClient):
    """(L03)"""
    peer.lose_replies = True
    results = await client.create_many(FAKE, n=3, timeout=60)
    peer.lose_replies = False
    assert [r.state for r in results] == ["running"] * 3
    assert len(peer.rows) == 3


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_a_cancelled_create_leaves_nothing(peer: Peer, client: DSecClient, steps: int):
    """At every await point of the call (L01, L02)."""
    peer.start_delay_s = 0.05
    creating = asyncio.create_task(client.create_many(FAKE, n=2, timeout=60))
    for _ in range(steps):
        await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await until(lambda: not client._core._background)
    assert peer.live() == []


async def test_a_cancel_while_the_node_works_leaves_nothing(peer: Peer, client: DSecClient):
    """(L01)"""
    peer.start_delay_s = 0.5
    creating = asyncio.create_task(client.create(FAKE, timeout=60))
    await until(lambda: peer.rows)
    creating.cancel()
    await asyncio.gather(creating, return_exceptions=True)
    await until(lambda: not client._core._background)
    await asyncio.sleep(0.6)
    assert [r.state for r in peer.rows.values()] == ["stopped"]


async def test_a_create_that_takes_too_long_is_given_up_everywhere(
    peer: Peer, client: DSecClient
):
    peer.start_delay_s = 600
    with pytest.raises(DeadlineExceeded) as caught:
        await client.create(FAKE, timeout=2)
    assert caught.value.is_infra
    await until(lambda: peer.rows and not peer.live())


async def test_without_waiting_the_sandbox_comes_up_by_itself(peer: Peer, client: DSecClient):
    peer.start_delay_s = 0.3
    sandbox = await client.create(FAKE, wait=False)
    assert sandbox.state == "requested"
    assert (await sandbox.exec("echo up")).text == "up\n"
    assert sandbox.state == "running"


async def test_closing_ends_what_belongs_to_no_job(peer: Peer):
    async with DSecClient(**peer.options()) as client:
        loose = await client.create(FAKE)
        kept = await client.create(DSecRunArgs(backend="fake", job="run-7"))
        ended = await client.create(FAKE)
        await ended.stop()
    assert peer.live() == [kept.uid]
    assert peer.rows[loose.uid].state == "stopped"
    assert peer.verbs.count("stop") == 2


async def test_closing_ends_what_is_still_being_made(peer: Peer):
    peer.start_delay_s = 1.0
    async with DSecClient(**peer.options()) as client:
        creating = asyncio.create_task(client.create(FAKE))
        await until(lambda: peer.rows)
    outcome = (await asyncio.gather(creating, return_exceptions=True))[0]
    assert isinstance(outcome, DSecError | Sandbox)
    await asyncio.sleep(1.1)
    await until(lambda: not peer.live())


async def test_a_missing_grant_is_forbidden_at_once(peer: Peer):
    peer.forbidden = {"req"}
    async with DSecClient(**peer.options()) as client:
        async with asyncio.timeout(60):
            with pytest.raises(Forbidden):
                await client.create(FAKE, timeout=600)
        assert [s async for s in client.list()] == []
    assert peer.rows == {}


async def test_a_foreign_project_is_forbidden(peer: Peer):
    async with DSecClient(**peer.options(project="other")) as client:
        with pytest.raises(Forbidden):
            await client.create(FAKE, timeout=60)
        with pytest.raises(Forbidden):
            await client.get(_ids.new())


async def test_a_wrong_key_is_refused_at_once(peer: Peer):
    async with asyncio.timeout(60):
        with pytest.raises(Unauthenticated):
            await DSecClient(**peer.options(api_key=KEY[:-1] + "x"), open_timeout=600).open()


async def test_a_revoked_key_fails_calls_and_a_restored_one_works_again(
    peer: Peer, client: DSecClient
):
    peer.refused_keys.add(KEY)
    await peer.kick()
    await until(lambda: client._core.link._denied is not None)
    with pytest.raises(Unauthenticated):
        await client.create(FAKE, timeout=60)
    peer.refused_keys.clear()
    await until(lambda: client._core.link._denied is None and client._core.link.is_up)
    assert (await client.create(FAKE, timeout=60)).state == "running"


async def test_no_server_is_unavailable(peer: Peer):
    with pytest.raises(Unavailable):
        await DSecClient(**peer.options(url="nats://127.0.0.1:9"), open_timeout=0.5).open()


async def test_a_server_that_restarts_under_creates_loses_none(peer: Peer, client: DSecClient):
    peer.start_delay_s = 0.3
    creating = [asyncio.create_task(client.create(FAKE, timeout=60)) for _ in range(5)]
    await until(lambda: len(peer.rows) == 5)
    await peer.kick()
    made = await asyncio.gather(*creating)
    assert len({s.id for s in made}) == 5 == len(peer.live())


async def test_a_message_over_the_limit_harms_nobody(peer: Peer, client: DSecClient):
    """Headers count (B04)."""
    limit = client._core.link._client.max_payload
    running = asyncio.create_task(client.create_many(FAKE, n=50, timeout=60))
    for size in (limit - 4096, limit, limit + 1):
        huge = DSecRunArgs(backend="fake", env={"K": "v" * size})
        if size < limit:
            assert (await client.create(huge, timeout=60)).state == "running"
            continue
        with pytest.raises(InvalidRequest) as caught:
            await client.create(huge, timeout=60)
        assert caught.value.field == "payload"
    assert len(await running) == 50
    assert client._core.link._client.stats["reconnects"] == 0


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_the_limit_is_exact(peer: Peer, client: DSecClient, over: int):
    """(B04)"""
    link = client._core.link
    headers = {"Some-Header": "é"}
    room = link._client.max_payload - len("NATS/1.0\r\nSome-Header: é\r\n\r\n".encode())
    sent = link.publish(f"dsec.req.v1.{PROJECT}.x.y", b"x" * (room + over), headers=headers)
    if over > 0:
        with pytest.raises(InvalidRequest):
            await sent
    else:
        await sent
        await link.flush(60)
    assert [s async for s in client.list()] == []
    assert link._client.stats["reconnects"] == 0


async def test_a_dead_sandbox_is_told_with_its_cause(peer: Peer, client: DSecClient):
    sandbox = await client.create(FAKE)
    peer.lose(sandbox.uid)
    with pytest.raises(SandboxDied) as caught:
        await sandbox.exec("true")
    assert (caught.value.cause, caught.value.is_infra) == ("node_lost", True)
    with pytest.raises(SandboxDied):
        await (await client.get(sandbox.id)).ready()


async def test_events_are_seen(peer: Peer, client: DSecClient):
    async def first() -> object:
        async for event in client.events(labels={"a": "b"}):
            return event

    waiting = asyncio.create_task(first())
    bus = peer._client
    async with asyncio.timeout(60):
        while not waiting.done():  # it listens from its first step on, a moment from now
            for labels in ({}, {"a": "b"}):
                event = {"uid": _ids.new(), "project": PROJECT, "state": "running",
                         "generation": 1, "at": 1.0, "labels": labels}  # fmt: skip
                subject = f"dsec.evt.v1.sandbox.{PROJECT}.running.{event['uid']}"
                await bus.publish(subject, json.dumps(event).encode())
            await asyncio.sleep(0.02)
    found = await waiting
    assert (found.labels, found.state) == ({"a": "b"}, "running")


async def test_an_event_that_is_sent_again_is_told_once(peer: Peer, client: DSecClient):
    told: list[str] = []

    async def all_of() -> None:
        async for event in client.events():
            told.append(event.uid)

    listening = asyncio.create_task(all_of())
    await until(lambda: client._core.link._subscriptions)
    await client._core.link.flush(60)
    uids = [_ids.new() for _ in range(3)]
    for uid in (uids[0], uids[0], uids[1], uids[0], uids[2]):
        event = {"uid": uid, "project": PROJECT, "state": "running", "generation": 1, "at": 1.0}
        subject = f"dsec.evt.v1.sandbox.{PROJECT}.running.{uid}"
        headers = {"Nats-Msg-Id": f"scheduler-{uid}"}
        await peer._client.publish(subject, json.dumps(event).encode(), headers=headers)
    await until(lambda: uids[2] in told)
    assert told == uids
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


async def test_nobody_else_hears_the_answers(peer: Peer, client: DSecClient):
    """The inbox is the principal's own."""
    assert client._core.link.inbox.startswith(f"_INBOX.{PRINCIPAL}.")
    with pytest.raises(nats.errors.Error):
        await nats.connect(peer.url, token="guess", allow_reconnect=False, connect_timeout=60)
