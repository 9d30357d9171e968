"""A connection that its server takes its time to decide about."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from libdsec._link import Link
from libdsec.config import Config
from shared.bus import Bus
from shared.settings import Common

WAIT_S = 60.0


@asynccontextmanager
async def hesitating(asks: int) -> AsyncIterator[str]:
    """A server that asks ``asks`` times whether its client is still there before it says that
    it may connect, as nats-server does while the auth callout is not answered."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "S", "version": "2.11.0", "max_payload": 1 << 20, "headers": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        assert (await reader.readline()).startswith(b"CONNECT")
        assert (await reader.readline()).startswith(b"PING")
        for _ in range(asks):
            writer.write(b"PING\r\n")
            assert (await reader.readline()).startswith(b"PONG")
        writer.write(b"PONG\r\n")
        while line := await reader.readline():
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@pytest.mark.parametrize("asks", [0, 1, 3])
async def test_a_service_is_connected_however_long_that_was_not_decided(asks: int) -> None:
    async with hesitating(asks) as url:
        bus = Bus(Common(nats_url=url), "late")
        async with asyncio.timeout(WAIT_S):
            await bus.start()
            assert bus.client.is_connected
            await bus.client.flush()
            await bus.close()


@pytest.mark.parametrize("asks", [0, 1, 3])
async def test_so_is_a_client(asks: int) -> None:
    async with hesitating(asks) as url:
        link = Link(Config(url, "team", "p", "key"), "c1")
        await link.open(WAIT_S)
        assert link.is_up
        await link.flush(WAIT_S)
        await link.close()
