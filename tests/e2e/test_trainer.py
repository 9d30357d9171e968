"""What a trainer sees, on the whole system with the fake backend."""

from __future__ import annotations

import asyncio
import json

import nats
import pytest

from libdsec import DSecClient, DSecRunArgs
from libdsec.errors import (
    Conflict,
    DSecError,
    Forbidden,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unsupported,
)
from shared import ids
from tests.e2e.conftest import alive, open_client, until, used

FAKE = DSecRunArgs(backend="fake", cpu_cores_limit=0.5, memory_limit_mb=64)


async def test_a_created_sandbox_runs_commands_and_ends(client: DSecClient) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    assert sandbox.state == "running"
    result = await sandbox.exec("echo", "hello")
    assert (result.exit_code, result.stdout) == (0, b"hello\n")
    await sandbox.files.write("/tmp/x", b"content")
    assert await sandbox.files.read("/tmp/x") == b"content"
    await sandbox.stop()
    info = await sandbox.info()
    assert info.state == "stopped"


async def test_a_batch_keeps_its_order_and_bad_items_get_their_own_error(
    client: DSecClient,
) -> None:
    good = FAKE
    bad = DSecRunArgs(backend="container", container_image="no-such-image:1")
    results = await client.create_many([good, bad, good], timeout=60)
    assert [type(r).__name__ for r in (results[0], results[2])] == ["Sandbox", "Sandbox"]
    assert isinstance(results[1], DSecError)
    assert results[1].field == "container_image"
    for result in (results[0], results[2]):
        await result.stop()


async def test_a_hundred_sandboxes_in_one_request(client: DSecClient) -> None:
    sandboxes = await client.create_many(FAKE, n=60, timeout=60)
    assert len({s.id for s in sandboxes}) == 60
    assert {s.state for s in sandboxes} == {"running"}
    await client.stop_many(sandboxes)
    await until(lambda: _none_alive(client), what="all sandboxes over")


async def _none_alive(client: DSecClient) -> bool:
    return not await alive(client, labels={})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_limit_mb": -5}, "memory_limit_mb"),
        ({"cpu_cores_limit": 1e9}, "cpu_cores_limit"),
        ({"pids_limit": 0}, "pids_limit"),
        ({"workdir": "relative"}, "workdir"),
    ],
)
async def test_absurd_limits_are_refused_by_name(
    client: DSecClient, changes: dict[str, object], field: str
) -> None:
    before = {s.uid for s in await alive(client)}
    with pytest.raises(InvalidRequest) as caught:
        await client.create(DSecRunArgs(**{"backend": "fake", **changes}), timeout=60)
    assert caught.value.field == field
    assert {s.uid for s in await alive(client)} <= before


async def test_an_unknown_image_is_refused_by_name(client: DSecClient) -> None:
    args = DSecRunArgs(backend="container", container_image="nowhere:1")
    with pytest.raises(DSecError) as caught:
        await client.create(args, timeout=60)
    assert caught.value.field == "container_image"
    assert isinstance(caught.value, NotFound | Unsupported)


async def test_a_backend_no_node_has_is_unsupported(fake_system, client: DSecClient) -> None:
    root = fake_system.options.image_roots[0] / "tiny"
    root.mkdir()
    (root / "file").write_text("content")
    await client.images.create("tiny:1", path=str(root))
    with pytest.raises(Unsupported) as caught:
        await client.create(DSecRunArgs(backend="vm", container_image="tiny:1"), timeout=60)
    assert caught.value.field == "backend"


async def test_a_foreign_project_and_a_missing_grant_are_forbidden(fake_system, client) -> None:
    project = await client.projects.create("walled", parent=fake_system.project)
    key = await client.keys.create(project=project.id, name="reader", grants=["sandbox.list"])
    async with open_client(fake_system, api_key=key.secret, project=project.id) as reader:
        assert [s async for s in reader.list()] == []
        with pytest.raises(Forbidden):
            await reader.create(FAKE, timeout=60)
    async with open_client(fake_system, api_key=key.secret) as foreign:
        with pytest.raises(Forbidden):
            await foreign.create(FAKE, timeout=60)


async def test_an_exceeded_quota_names_the_limit(fake_system, client) -> None:
    project = await client.projects.create("small", parent=fake_system.project)
    await client.quotas.create(project=project.id, sandboxes=2)
    async with open_client(fake_system, project=project.id) as small:
        results = await small.create_many(FAKE, n=3, timeout=60)
        refused = [r for r in results if isinstance(r, QuotaExceeded)]
        assert len(refused) == 1
        assert "sandboxes" in (refused[0].field or "")
        for sandbox in results:
            if not isinstance(sandbox, DSecError):
                await sandbox.stop()
                again = await small.create(FAKE, timeout=60)  # its place is free at once
                await again.stop()
    await until(lambda: _unused(client, project.id), what="quota back to zero")


async def _unused(client: DSecClient, project: str) -> bool:
    return await used(client, project) == 0


async def test_a_repeated_request_is_the_same_sandbox(client: DSecClient) -> None:
    key = ids.new()
    first = await client.create(FAKE, request_id=key, timeout=60)
    again = await client.create(FAKE, request_id=key, timeout=60)
    assert first.id == again.id
    with pytest.raises(Conflict):
        other = DSecRunArgs(backend="fake", memory_limit_mb=128)
        await client.create(other, request_id=key, timeout=60)
    together = await asyncio.gather(
        *(client.create(FAKE, request_id=(k := key), timeout=60) for _ in range(10))
    )
    assert {s.id for s in together} == {first.id} and k == key
    await first.stop()


async def test_a_trainer_without_an_sdk_needs_only_json(fake_system) -> None:
    connection = await nats.connect(fake_system.url, token=fake_system.admin_key,
                                    inbox_prefix=_inbox(fake_system.admin_key))  # fmt: skip
    try:
        project = fake_system.project
        uid = ids.new()  # alone: others' events may come after their answers
        events = await connection.subscribe(f"dsec.evt.v1.sandbox.{project}.running.{uid}")
        body = {"request_id": uid, "specs": [{"backend": "fake"}]}
        await connection.request(
            f"dsec.req.v1.{project}.sandbox.create", json.dumps(body).encode(), timeout=30
        )
        event = json.loads((await events.next_msg(timeout=60)).data)
        assert (event["uid"], event["state"]) == (uid, "running")
        stop = {"request_id": ids.new(), "uids": [uid]}
        await connection.request(
            f"dsec.req.v1.{project}.sandbox.stop", json.dumps(stop).encode(), timeout=30
        )
    finally:
        await connection.close()


def _inbox(api_key: str) -> str:
    return f"_INBOX.{api_key.split('_')[1]}.plain"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"this is not json", "invalid_request"),
        (b'{"v": 9, "request_id": "x"}', "unsupported"),
        (b'{"request_id": 12}', "invalid_request"),
    ],
)
async def test_what_cannot_be_read_is_answered_and_the_service_goes_on(
    fake_system, client: DSecClient, body: bytes, code: str
) -> None:
    prefix = _inbox(fake_system.admin_key)
    connection = await nats.connect(
        fake_system.url, token=fake_system.admin_key, inbox_prefix=prefix
    )
    try:
        answers = await connection.subscribe(f"{prefix}.answer")
        await connection.request(
            f"dsec.req.v1.{fake_system.project}.sandbox.create", body, timeout=30,
            headers={"Dsec-Reply": f"{prefix}.answer"},
        )  # fmt: skip
        answer = json.loads((await answers.next_msg(timeout=60)).data)
        assert answer["error"]["code"] == code
    finally:
        await connection.close()
    sandbox = await client.create(FAKE, timeout=60)
    await sandbox.stop()


async def test_a_payload_over_the_limit_is_refused_before_it_is_sent(client: DSecClient) -> None:
    huge = {f"K{i}": "v" * 1000 for i in range(9_000)}
    with pytest.raises(InvalidRequest) as caught:
        await client.create(DSecRunArgs(backend="fake", env=huge), timeout=60)
    assert caught.value.field in {"payload", "env"}
    sandbox = await client.create(FAKE, timeout=60)
    await sandbox.stop()


async def test_every_verb_is_in_the_audit_record_once(client: DSecClient) -> None:
    sandbox = await client.create(FAKE, timeout=60)
    await sandbox.exec("true")
    await sandbox.stop()

    async def verbs() -> list[str] | None:
        entries = [e async for e in client.audit.list(limit=500)]
        mine = [e.record for e in entries if _about(e.record, sandbox)]
        found = sorted(r["verb"] for r in mine)
        return found if {"create", "exec", "stop"} <= {v.split(".")[-1] for v in found} else None

    found = await until(verbs, what="audit records")
    assert len([v for v in found if v.endswith("create")]) == 1
    assert len([v for v in found if v.endswith("exec")]) == 1
    assert len([v for v in found if v.endswith("stop")]) == 1


def _about(record: dict[str, str], sandbox: object) -> bool:
    uid = sandbox.id.rpartition("-")[2]
    return uid in f"{record.get('target')} {record.get('request_id')}"
