"""auth while the database or the bus is away, and after."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import nats.errors
import pytest
import pytest_asyncio

from devstack import Infra
from services.auth import bootstrap
from services.auth.app import App
from shared import ids, migrate, topology
from tests.integration.auth.conftest import (
    MARKS,
    ROOT,
    Person,
    Stack,
    connect,
    make_settings,
    new_key,
    ready,
    used,
)  # fmt: skip

pytestmark = [*MARKS, pytest.mark.slow]

BACK_S = 120.0
STANDS_S = 4.0
"""Longer than auth waits for one answer of the system account."""


@pytest_asyncio.fixture(loop_scope="session")
async def broken(tmp_path: Path) -> AsyncIterator[tuple[Infra, Stack]]:
    """A stack of its own, to be broken."""
    infra = Infra(tmp_path / "stack")
    async with infra as endpoints:
        dsns = await migrate.prepare(endpoints.pg_dsn_admin, {"auth": "x"})
        secrets = await bootstrap.bootstrap(dsns["auth"], endpoints.account_seed)
        settings = make_settings(endpoints, dsns["auth"])
        app = App(settings)
        await app.start()
        await topology.declare(app.bus.js)
        await ready(app)
        yield infra, Stack(endpoints, settings, app, app.db, app.bus, secrets)
        await app.close()


async def back(stack: Stack) -> Person:
    """A connection, as soon as one can be had."""
    async with asyncio.timeout(BACK_S):
        while True:
            try:
                return await connect(stack, stack.secrets.admin_key)
            except (nats.errors.Error, OSError, TimeoutError):
                await asyncio.sleep(0.2)


async def publish(person: Person) -> str:
    request = {"request_id": ids.new(), "specs": [{"backend": "fake"}]}
    await person.nc.request(
        f"dsec.req.v1.{ROOT}.sandbox.create.{person.principal}", json.dumps(request).encode(),
        timeout=60,
    )  # fmt: skip
    return str(request["request_id"])


async def test_without_the_database_requests_wait_and_known_clients_get_in(
    broken: tuple[Infra, Stack],
) -> None:
    infra, stack = broken
    person = await connect(stack, stack.secrets.admin_key)
    await infra.kill("postgres")
    await publish(person)
    known = await connect(stack, stack.secrets.admin_key)
    await known.nc.close()
    for key in (f"dsec_{ids.new()}_{'x' * 43}", stack.secrets.admin_key[:-4] + "AAAA"):
        with pytest.raises((nats.errors.Error, OSError, TimeoutError)):
            await connect(stack, key, patient=False)
    reply = await person.read(ROOT, "quota", "get")
    assert (reply["error"]["code"], reply["error"]["retryable"]) == ("unavailable", True)
    await infra.restart("postgres")
    again = await back(stack)
    async with asyncio.timeout(BACK_S):
        while await used(stack, ROOT) != (1, 1000, 512):
            await asyncio.sleep(0.2)
    await again.nc.close()
    await person.nc.close()


async def test_an_outage_gives_back_no_key_that_was_revoked(
    broken: tuple[Infra, Stack],
) -> None:
    """Not connected when it was revoked, so that its end was not read by any connect."""
    infra, stack = broken
    admin = await connect(stack, stack.secrets.admin_key)
    key = await new_key(admin, ROOT, "sandbox.list")
    person = await connect(stack, key["secret"])
    await person.nc.close()
    assert (await admin.change(ROOT, "key", "delete", id=key["id"]))["key"]["revoked"] is True
    await infra.kill("postgres")
    with pytest.raises((nats.errors.Error, OSError, TimeoutError)):
        await connect(stack, key["secret"], patient=False)
    await (await connect(stack, stack.secrets.admin_key)).nc.close()
    await admin.nc.close()


async def test_a_key_revoked_by_one_instance_is_forgotten_by_the_other(
    broken: tuple[Infra, Stack],
) -> None:
    infra, stack = broken
    other = App(stack.settings)
    await other.start()
    await ready(other)
    admin = await connect(stack, stack.secrets.admin_key)
    key = await new_key(admin, ROOT, "sandbox.list")
    remembered = stack.app.callout._known
    async with asyncio.timeout(BACK_S):
        while remembered.get(key["principal"], time.time()) is None:
            await (await connect(stack, key["secret"])).nc.close()
    await stack.app.requests.close()  # the other one makes the change
    assert (await admin.change(ROOT, "key", "delete", id=key["id"]))["key"]["revoked"] is True
    await other.close()
    await infra.kill("postgres")
    with pytest.raises((nats.errors.Error, OSError, TimeoutError)):
        await connect(stack, key["secret"], patient=False)
    await admin.nc.close()


async def test_after_the_bus_was_away_clients_get_in_again(broken: tuple[Infra, Stack]) -> None:
    infra, stack = broken
    await infra.kill("nats")
    await asyncio.sleep(0.5)
    await infra.restart("nats")
    person = await back(stack)
    await publish(person)
    async with asyncio.timeout(BACK_S):
        while await used(stack, ROOT) != (1, 1000, 512):
            await asyncio.sleep(0.2)
    assert "quota" in await person.read(ROOT, "quota", "get")
    await person.nc.close()


async def test_a_server_that_stands_still_keeps_no_revoked_connection(
    broken: tuple[Infra, Stack],
) -> None:
    infra, stack = broken
    admin = await connect(stack, stack.secrets.admin_key)
    key = await new_key(admin, ROOT, "sandbox.list")
    person = await connect(stack, key["secret"])
    server = infra.pid("nats")
    assert server is not None
    await admin.change(ROOT, "key", "delete", id=key["id"])
    os.kill(server, signal.SIGSTOP)
    try:
        await asyncio.sleep(STANDS_S)
    finally:
        os.kill(server, signal.SIGCONT)
    async with asyncio.timeout(BACK_S):
        while not person.nc.is_closed:
            await asyncio.sleep(0.02)
    await admin.nc.close()
