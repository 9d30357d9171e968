"""Faults of the way between client and node: large bodies, and requests that ask for
what they must not have."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from typing import Any

import nats
import pytest

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    InvalidRequest,
    Sandbox,
    Unauthenticated,
)
from tests.e2e.conftest import alive, open_client
from tests.faults.conftest import CREATE_S, HANG_S, IMAGE, World, container_args, fake_args

FILE_BYTES, OUTPUT_BYTES = 8 << 20, 2 << 20


@pytest.mark.docker
async def test_large_bodies_pass_and_their_neighbours_do_not_notice(
    world: World, client: DSecClient
) -> None:
    """(B04) A file of 8 MiB and an output of 2 MiB, on one connection with others."""
    data = random.Random(4).randbytes(FILE_BYTES)
    link = client._core.link._client
    before = link.stats["reconnects"]
    boxes = await client.create_many(container_args(), n=2, timeout=CREATE_S)
    large, neighbour = (b for b in boxes if isinstance(b, Sandbox))
    slowest = 0.0
    done = asyncio.Event()

    async def work() -> int:
        nonlocal slowest
        count = 0
        while not done.is_set():
            began = time.monotonic()
            assert (await neighbour.exec("echo", "here")).stdout == b"here\n"
            slowest = max(slowest, time.monotonic() - began)
            count += 1
        return count

    working = asyncio.create_task(work())
    for _ in range(3):
        assert await large.files.write("/large", data) == FILE_BYTES
        assert hashlib.sha256(await large.files.read("/large")).digest() == (
            hashlib.sha256(data).digest()
        )
        ran = await large.exec("head -c 2097152 /large; head -c 2097152 /large >&2")
        assert (ran.stdout, ran.stderr) == (data[:OUTPUT_BYTES],) * 2
        assert ran.truncated == (0, 0)
        ran = await large.exec("cat", stdin=data)
        assert ran.stdout == data
    done.set()
    assert await working > 3
    assert slowest < HANG_S
    assert link.stats["reconnects"] == before, "nobody lost the connection"
    await client.stop_many([large, neighbour])


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_the_limit_of_a_message_is_exact_and_named(
    world: World, client: DSecClient, over: int
) -> None:
    """(B04) With headers; one more byte is refused here, and the link lives."""
    link = client._core.link
    headers = {"Some-Header": "é"}
    room = link._client.max_payload - len("NATS/1.0\r\nSome-Header: é\r\n\r\n".encode())
    subject = client._core.calls.get_subject(client.project, "whoami", "get")
    before = link._client.stats["reconnects"]
    reading = asyncio.create_task(client.whoami())
    if over > 0:
        with pytest.raises(InvalidRequest) as caught:
            await link.publish(subject, b"x" * (room + over), headers=headers)
        assert caught.value.field == "payload"
    else:
        await link.publish(subject, b"x" * (room + over), headers=headers)
        await link.flush(HANG_S)
    assert (await reading).principal
    assert link._client.stats["reconnects"] == before


async def test_a_create_over_the_limit_is_refused_by_name(client: DSecClient) -> None:
    """(B04)"""
    limit = client._core.link._client.max_payload
    with pytest.raises(InvalidRequest) as caught:
        await client.create(container_args(env={"K": "v" * limit}), timeout=60)
    assert caught.value.field in ("payload", "env")


class Asking(DSecContainerRunArgs):
    """Run arguments with fields that there are none of."""

    extra: dict[str, Any] = {}

    def to_spec(self) -> dict[str, Any]:
        return super().to_spec() | self.extra


PATHS = ("/var/run/docker.sock", "/", "/proc", "../..", "/tmp/link-to-root")


@pytest.mark.parametrize(
    "extra",
    [
        *({name: [path]} for name in ("mounts", "volumes", "binds") for path in PATHS),
        {"mounts": [{"source": "/", "target": "/host"}]}, {"volumes": {"/": {"bind": "/host"}}},
        {"privileged": True}, {"devices": ["/dev/kmsg"]}, {"cap_add": ["SYS_ADMIN"]},
        {"network": "host"}, {"network_mode": "host"}, {"pid": "host"}, {"runtime": "x"},
        {"security_opt": ["seccomp=unconfined"]}, {"host_config": {"Binds": ["/:/host"]}},
    ],
    ids=str,
)  # fmt: skip
async def test_fields_that_there_are_none_of_are_refused_by_name(
    client: DSecClient, extra: dict[str, Any]
) -> None:
    """(S01) Nothing of the host is given away by a field nobody reads."""
    args = Asking(container_image=IMAGE, memory_limit_mb=64)
    args.extra = extra
    before = {s.uid for s in await alive(client)}
    with pytest.raises(DSecError) as caught:
        await client.create(args, timeout=60)
    assert (caught.value.code, caught.value.field) == ("unsupported", next(iter(extra)))
    assert {s.uid for s in await alive(client)} <= before


@pytest.mark.docker
@pytest.mark.parametrize("name", ["mounts", "binds", "privileged", "volumes"])
async def test_options_of_a_backend_open_no_way_to_the_host(client: DSecClient, name: str) -> None:
    """(S01) Unknown ones are refused, not carried to the engine."""
    args = container_args(options={name: ["/:/host"]})
    with pytest.raises(DSecError) as caught:
        await client.create(args, timeout=60)
    assert (caught.value.code, caught.value.field) == ("unsupported", f"options.{name}")


@pytest.mark.parametrize("path", ["/etc", "/", "/proc", "/var/run/docker.sock", "up", "link"])
async def test_images_come_from_the_allowed_folders_alone(
    world: World, client: DSecClient, path: str
) -> None:
    """(S01)"""
    if path == "up":
        path = f"{world.images}/../.."
    if path == "link":
        link = world.images / "link-to-root"
        if not link.is_symlink():
            link.symlink_to("/etc")
        path = str(link)
    with pytest.raises(DSecError) as caught:
        await client.images.create("stolen:1", path=path)
    assert caught.value.code in ("forbidden", "invalid_request", "not_found", "policy_denied")
    with pytest.raises(DSecError):
        await client.images.get("stolen:1")


async def test_without_a_key_nothing_is_answered(world: World) -> None:
    """(S01) No key, an empty one, a wrong one, a user name, one of nobody."""
    for key in ("wrong", world.system.admin_key[:-1] + "~", f"dsec_{'0' * 26}_{'x' * 43}"):
        with pytest.raises((Unauthenticated, InvalidRequest)):
            await open_client(world.system, api_key=key, open_timeout=HANG_S).open()
    ways: list[dict[str, Any]] = [{}, {"token": ""}, {"user": "auth", "password": ""},
                                  {"user": "sys", "password": "sys"}]  # fmt: skip
    for way in ways:
        with pytest.raises(nats.errors.Error):
            await nats.connect(
                world.system.url, allow_reconnect=False, max_reconnect_attempts=0,
                connect_timeout=20, error_cb=_quiet, **way,
            )  # fmt: skip


async def _quiet(_error: Exception) -> None:
    return None


async def test_a_key_sees_no_other_projects_sandboxes(world: World, client: DSecClient) -> None:
    """(S01)"""
    mine = (await client.projects.create("mine")).id
    theirs = (await client.projects.create("theirs")).id
    key = await client.keys.create(project=mine, grants=["sandbox.*"])
    async with open_client(world.system, project=theirs) as owner:
        sandbox = await owner.create(fake_args(), timeout=CREATE_S)
        async with open_client(world.system, project=mine, api_key=key.secret) as stranger:
            with pytest.raises(DSecError) as caught:
                await stranger.get(sandbox.id)
            assert caught.value.code == "not_found"
        async with open_client(world.system, project=theirs, api_key=key.secret) as stranger:
            with pytest.raises(DSecError) as caught:
                await stranger.create(fake_args(), timeout=60)
            assert caught.value.code == "forbidden"
        assert (await sandbox.info()).state == "running"
