"""What FastStream and the server do, on which the bus and the consumer are built.

When one of these fails after an update of a package, a reason for a piece of our own
code has gone, or a default that protects messages has changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from faststream import AckPolicy
from faststream.nats import JStream, NatsBroker, PullSub
from faststream.nats.security import NatsUserPassword
from nats.js.api import DiscardPolicy, RetentionPolicy, StreamConfig
from nats.js.errors import APIError

from shared.bus import Bus
from tests.integration.conftest import Stack
from tests.integration.shared.streams import make_durable, messages

pytestmark = pytest.mark.integration

FETCH_S = 20.0


@pytest.fixture
async def broker(stack: Stack) -> AsyncIterator[NatsBroker]:
    users = stack.endpoints.nats_users
    made = NatsBroker(
        stack.endpoints.nats_url, security=NatsUserPassword("scheduler", users["scheduler"])
    )
    yield made
    await made.stop()


async def subscribed(broker: NatsBroker, durable: Any, fn: Any, **options: Any) -> None:
    stream = JStream(durable.stream, declare=False)
    broker.subscriber(
        durable.filters[0], stream=stream, durable=durable.name, **options
    )(fn)
    await broker.start()


async def test_the_default_policy_loses_a_message_whose_handler_fails(
    bus: Bus, broker: NatsBroker
) -> None:
    durable = await make_durable(bus, ack_wait_s=1)
    calls = 0

    async def fail(body: Any) -> None:
        nonlocal calls
        calls += 1
        raise ValueError

    await subscribed(broker, durable, fail, pull_sub=PullSub(timeout=0.2))
    await bus.store(messages(durable, ["m"]))
    while not calls:
        await asyncio.sleep(0.05)
    await asyncio.sleep(2.5)  # longer than ack_wait
    assert calls == 1


async def test_our_policy_has_it_delivered_again(bus: Bus, broker: NatsBroker) -> None:
    durable = await make_durable(bus, ack_wait_s=1)
    calls = 0

    async def fail_once(body: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ValueError

    await subscribed(
        broker, durable, fail_once, pull_sub=PullSub(timeout=0.2),
        ack_policy=AckPolicy.NACK_ON_ERROR,
    )  # fmt: skip
    await bus.store(messages(durable, ["m"]))
    while calls < 2:
        await asyncio.sleep(0.05)


def test_the_bus_sets_that_policy_for_all(stack: Stack) -> None:
    made = Bus(stack.settings(), "test")
    assert made.broker.config.ack_policy is AckPolicy.NACK_ON_ERROR


async def test_its_batch_pull_waits_out_its_timeout(bus: Bus, broker: NatsBroker) -> None:
    """Why stored messages are consumed by shared.consumer (docs/adr/0002)."""
    durable = await make_durable(bus)
    got = asyncio.Event()

    async def take(body: Any) -> None:
        got.set()

    await subscribed(
        broker, durable, take, pull_sub=PullSub(batch_size=256, timeout=FETCH_S, batch=True)
    )
    async with asyncio.timeout(60):  # it is under way
        while not (await bus.js.consumer_info(durable.stream, durable.name)).num_waiting:
            await asyncio.sleep(0.02)
    await bus.store(messages(durable, ["m"]))
    await asyncio.sleep(0.4)
    assert not got.is_set(), "the message lies there until the fetch times out"


async def test_a_work_queue_forbids_a_second_listener(bus: Bus) -> None:
    await bus.js.add_stream(
        StreamConfig(name="WQ", subjects=["wq.>"], retention=RetentionPolicy.WORK_QUEUE)
    )
    try:
        await bus.js.pull_subscribe("wq.>", durable="one", stream="WQ")
        with pytest.raises(APIError) as caught:
            await bus.js.pull_subscribe("wq.a", durable="two", stream="WQ")
        assert caught.value.err_code == 10100
    finally:
        await bus.js.delete_stream("WQ")


async def test_a_full_stream_refuses_instead_of_forgetting(bus: Bus) -> None:
    from shared.bus import Outgoing
    from shared.errors import Unavailable

    await bus.js.add_stream(
        StreamConfig(name="FULL", subjects=["full.>"], max_msgs=2, discard=DiscardPolicy.NEW)
    )
    try:
        await bus.store([Outgoing("full.a", b"1"), Outgoing("full.b", b"2")])
        with pytest.raises(Unavailable, match=r"10077|maximum messages"):
            await bus.store([Outgoing("full.c", b"3")])
        assert (await bus.js.stream_info("FULL")).state.messages == 2
    finally:
        await bus.js.delete_stream("FULL")


async def test_a_stored_request_is_answered_by_the_stream(bus: Bus) -> None:
    """Why the client's answer goes to a subject named in a header."""
    durable = await make_durable(bus)
    reply = await bus.client.request(durable.filters[0], b"{}", timeout=60)
    assert f'"stream":"{durable.stream}"'.encode() in reply.data
