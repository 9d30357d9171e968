"""The load view may be flushed at any moment."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from schemas.node import Heartbeat, Resources
from shared.errors import Unavailable
from shared.loadview import LOAD, LoadView
from tests.integration.conftest import Stack

pytestmark = pytest.mark.integration


def beat(node: str, seq: int = 1) -> Heartbeat:
    return Heartbeat(
        node=node, epoch="e", seq=seq, at=1.5, capacity=Resources(cores=4.0),
        committed=Resources(), used=Resources(), counts={"fake": {"root": 3}},
    )  # fmt: skip


@pytest.fixture
async def server(stack: Stack) -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(stack.endpoints.redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def view(stack: Stack, server: redis.Redis) -> AsyncIterator[LoadView]:
    made = LoadView(stack.endpoints.redis_url)
    yield made
    await made.close()


async def test_the_last_heartbeat_of_each_node_is_read_back(view: LoadView) -> None:
    await view.write([beat("n1"), beat("n2")])
    await view.write([beat("n1", seq=2)])
    found = await view.read()
    assert found == {"n1": beat("n1", seq=2), "n2": beat("n2")}


async def test_a_flush_empties_the_view_until_the_next_heartbeats(
    view: LoadView, server: redis.Redis
) -> None:
    await view.write([beat("n1"), beat("n2")])
    await server.flushall()
    assert await view.read() == {}
    await view.write([beat("n1")])
    assert set(await view.read()) == {"n1"}


async def test_a_silent_node_leaves_the_view(view: LoadView, server: redis.Redis) -> None:
    await view.write([beat("n1"), beat("n2")])
    assert 0 < await server.ttl(LOAD + "n1") <= 15
    await server.delete(LOAD + "n1")
    assert set(await view.read()) == {"n2"}
    assert await server.smembers("dsec:nodes") == {b"n2"}


async def test_an_entry_of_another_version_is_as_good_as_none(
    view: LoadView, server: redis.Redis
) -> None:
    await view.write([beat("n1"), beat("n2")])
    await server.set(LOAD + "n1", b'{"v": 99, "shape": "unknown"}')
    assert set(await view.read()) == {"n2"}


async def test_nothing_to_write_is_no_error(view: LoadView) -> None:
    await view.write([])
    assert await view.read() == {}


async def test_without_redis_every_call_says_unavailable_and_recovers(own_stack: Stack) -> None:
    view = LoadView(own_stack.endpoints.redis_url)
    await view.write([beat("n1")])
    await own_stack.do(own_stack.infra.kill("valkey"))
    for call in (view.read, view.ping, lambda: view.write([beat("n1")])):
        with pytest.raises(Unavailable):
            await call()
    await own_stack.do(own_stack.infra.restart("valkey"))
    await view.ping()
    assert await view.read() == {}
    await view.close()
