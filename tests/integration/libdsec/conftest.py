"""A peer on a real nats-server, and a client of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecRunArgs, Sandbox
from tests.integration.libdsec.peer import Peer

FAKE = DSecRunArgs(backend="fake")


@pytest.fixture
async def peer(tmp_path: Path) -> AsyncIterator[Peer]:
    peer = Peer(tmp_path)
    await peer.start()
    yield peer
    await peer.stop()


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[DSecClient]:
    async with DSecClient(**peer.options()) as client:
        yield client


@pytest.fixture
async def sandbox(client: DSecClient) -> Sandbox:
    return await client.create(FAKE, timeout=60)


async def until(condition: Callable[[], object], *, within_s: float = 60.0) -> None:
    """Waits for a condition; fails when it stays false."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "not in time"
        await asyncio.sleep(0.02)
