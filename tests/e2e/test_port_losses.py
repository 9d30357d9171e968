"""Connections while the bus or the edge is lost, and who may make them: on fake sandboxes,
whose port 7 sends back what it gets."""

from __future__ import annotations

import asyncio
import os

import pytest

from libdsec import (
    Connection,
    DSecClient,
    DSecRunArgs,
    Forbidden,
    PortRefused,
    PortReset,
    _operation,
)
from services.local import LocalSystem
from tests.e2e.conftest import open_client

pytestmark = pytest.mark.slow

FAKE = DSecRunArgs(backend="fake")
ECHO = 7
MIB = 1 << 20


async def echoed(connection: Connection, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        part = await connection.read()
        assert part, "it ended"
        got += part
    return bytes(got)


async def test_a_server_that_dies_under_a_connection_costs_no_byte(
    fake_system: LocalSystem, client: DSecClient
) -> None:
    """The bus, not what listens: every byte arrives once, in both directions."""
    async with await client.create(FAKE, timeout=60) as made, await made.connect(ECHO) as open_:
        data = os.urandom(24 * MIB)

        async def send() -> None:
            for at in range(0, len(data), MIB):
                await open_.write(data[at : at + MIB])

        sending = asyncio.create_task(send())
        first = await echoed(open_, 2 * MIB)
        await fake_system.restart_infra("nats", kill=True)
        rest = await asyncio.wait_for(echoed(open_, len(data) - len(first)), 60)
        assert first + rest == data
        await sending
        await open_.close_write()
        assert await open_.read() == b""


async def test_a_killed_edge_breaks_connections_and_takes_new_ones(
    fake_system: LocalSystem, client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_operation, "SILENCE_S", 1.0)
    async with await client.create(FAKE, timeout=60) as made:
        broken = await made.connect(ECHO)
        await broken.write(b"before")
        assert await echoed(broken, 6) == b"before"
        edge = f"edge-{made.node}"
        await fake_system.kill(edge)
        await fake_system.restart(edge)
        with pytest.raises(PortReset, match="restarted") as caught:
            await asyncio.wait_for(broken.read(), 60)
        assert caught.value.is_infra
        with pytest.raises(PortReset):
            await broken.write(b"more")
        async with await made.connect(ECHO) as again:
            await again.write(b"after")
            assert await echoed(again, 5) == b"after"


async def test_waiting_goes_on_over_a_restart_of_the_edge(
    fake_system: LocalSystem, client: DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent yet, so there is nothing to lose."""
    monkeypatch.setattr(_operation, "SILENCE_S", 1.0)
    async with await client.create(FAKE, timeout=60) as made:
        waiting = asyncio.create_task(made.connect(8080, wait=4))
        await asyncio.sleep(1)
        edge = f"edge-{made.node}"
        await fake_system.kill(edge)
        await fake_system.restart(edge)
        with pytest.raises(PortRefused):  # as the answer of the new one is
            await asyncio.wait_for(waiting, 60)


async def test_a_paused_sandbox_is_resumed_by_a_connection(client: DSecClient) -> None:
    async with await client.create(FAKE, timeout=60) as made:
        await made.pause()
        async with await made.connect(ECHO) as open_:
            await open_.write(b"x")
            assert await echoed(open_, 1) == b"x"


async def test_a_grant_of_its_own_opens_ports_alone(
    fake_system: LocalSystem, client: DSecClient
) -> None:
    grants = ["sandbox.connect", "sandbox.get"]
    key = await client.keys.create(project=client.project, grants=grants)
    async with (
        await client.create(FAKE, timeout=60) as made,
        open_client(fake_system, api_key=key.secret, keep=True) as guest,
    ):
        seen = await guest.get(made.id)
        async with await seen.connect(ECHO) as open_:
            await open_.write(b"x")
            assert await echoed(open_, 1) == b"x"
        with pytest.raises(Forbidden):
            await seen.exec("true")
