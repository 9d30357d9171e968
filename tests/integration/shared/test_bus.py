"""The bus: errors stay typed, sizes are judged here, outages end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import nats
import pytest
from nats.errors import SlowConsumerError

from devstack.process import free_port
from devstack.supervised import health as ask
from schemas.base import Ok, Versioned
from shared.bus import HEADER_BYTES, Bus, Incoming, Outgoing
from shared.errors import Conflict, Internal, InvalidRequest, Unavailable, Unsupported
from shared.health import Health
from shared.settings import Common
from tests.integration.conftest import Stack
from tests.integration.shared.streams import (
    BatchConsumer,
    Recorder,
    make_durable,
    messages,
    stored,
)

pytestmark = pytest.mark.integration


class Question(Versioned, frozen=True):
    number: int
    text: str = ""


async def answering(bus: Bus, subject: str, fn: Any) -> None:
    bus.answer(subject, Question, fn)
    await bus.broker.start()  # also those that were added after the start


async def double(question: Question, _: Incoming) -> Question:
    return Question(number=question.number * 2)


async def test_a_typed_error_crosses_the_bus_with_its_field(bus: Bus) -> None:
    async def refuse(question: Question, _: Incoming) -> Ok:
        raise Conflict("another body", field="request_id", details={"number": question.number})

    await answering(bus, "q.refuse", refuse)
    with pytest.raises(Conflict) as caught:
        await bus.request("q.refuse", Question(number=7), Ok)
    assert caught.value.field == "request_id"
    assert caught.value.details == {"number": 7}
    assert not caught.value.retryable


async def test_an_unexpected_error_is_internal_and_keeps_its_text_inside(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(question: Question, _: Incoming) -> Ok:
        raise ZeroDivisionError("a secret detail")

    await answering(bus, "q.fail", fail)
    with pytest.raises(Internal) as caught:
        await bus.request("q.fail", Question(number=7), Ok)
    assert "secret" not in caught.value.message
    assert "a secret detail" in caplog.text, "the log has the cause"


@pytest.mark.parametrize(
    ("body", "error", "field"),
    [
        (b"not json", InvalidRequest, None),
        (b'{"number": "seven"}', InvalidRequest, "number"),
        (b"{}", InvalidRequest, "number"),
        (b'{"v": 9, "number": [[]]}', Unsupported, "v"),
        (b"[" * 100_000, InvalidRequest, None),
    ],
)
async def test_a_bad_body_is_answered_with_what_is_wrong(
    bus: Bus, body: bytes, error: type[Exception], field: str | None
) -> None:
    from shared.bus import unwrap

    await answering(bus, "q.double", double)
    reply = await bus.client.request("q.double", body, timeout=60)
    with pytest.raises(error) as caught:
        unwrap(reply.data, Question)
    assert getattr(caught.value, "field", None) == field
    assert (await bus.request("q.double", Question(number=2), Question)).number == 4


async def test_nobody_and_silence_are_unavailable(bus: Bus) -> None:
    with pytest.raises(Unavailable, match="nobody"):
        await bus.request("q.nobody", Question(number=1), Ok)
    await bus.client.subscribe("q.silent")
    await bus.client.flush()
    with pytest.raises(Unavailable, match="no answer"):
        await bus.request("q.silent", Question(number=1), Ok, timeout_s=0.2)


@pytest.mark.parametrize("over", [-1, 0, 1])
async def test_the_payload_limit_is_judged_before_the_server_ends_the_link(
    bus: Bus, over: int
) -> None:
    """(B04) Headers count; a parallel request on the connection is unharmed."""
    await answering(bus, "q.size", double)
    headers = {"Dsec-Test": "h" * 1000}
    overhead = len("Dsec-Test") + 1000 + 4
    size = bus.client.max_payload - HEADER_BYTES - overhead + over
    parallel = asyncio.create_task(bus.request("q.size", Question(number=1), Question))
    message = Outgoing("q.sink", b"x" * size, headers, msg_id="m" * 64)
    if over > 0:
        for publish in (bus.send(message), bus.store([message])):
            with pytest.raises(InvalidRequest) as caught:
                await publish
            assert caught.value.field == "payload"
    else:
        await bus.send(message)
        await bus.client.flush()
    assert (await parallel).number == 2
    assert bus.client.is_connected
    assert bus.client.stats["reconnects"] == 0


async def test_a_large_message_through_a_stream_counts_its_message_id(bus: Bus) -> None:
    durable = await make_durable(bus)
    size = bus.client.max_payload - HEADER_BYTES
    await bus.store([Outgoing(durable.filters[0], b"x" * size, msg_id="m" * 200)])
    assert bus.client.stats["reconnects"] == 0


async def test_stored_messages_with_one_id_are_one(bus: Bus) -> None:
    durable = await make_durable(bus)
    await bus.store(messages(durable, ["a", "b", "a"]))
    await bus.store(messages(durable, ["b"]))
    assert (await bus.js.stream_info(durable.stream)).state.messages == 2


async def test_a_subject_without_a_stream_is_unavailable_and_leaves_nothing_behind(
    bus: Bus,
) -> None:
    for _ in range(3):
        with pytest.raises(Unavailable, match="not stored: no stream"):
            await bus.store([Outgoing("no.stream.here", b"x")] * 10)
    assert bus._stored is not None
    assert bus._stored.in_flight == 0


async def test_storing_recovers_after_more_losses_than_may_be_in_flight(own_stack: Stack) -> None:
    """Acknowledgements that never come must not use up places."""
    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    durable = await make_durable(bus)
    many = messages(durable, [f"m{i}" for i in range(3000)])
    for _ in range(3):
        storing = asyncio.create_task(bus.store(many))
        await asyncio.sleep(0.005)
        await own_stack.do(own_stack.infra.kill("nats"))
        await asyncio.gather(storing, return_exceptions=True)
        await own_stack.do(own_stack.infra.restart("nats"))
        async with asyncio.timeout(60):
            while not bus.client.is_connected:
                await asyncio.sleep(0.05)
    await stored(bus, many)
    assert (await bus.js.stream_info(durable.stream)).state.messages == 3000
    assert bus._stored is not None
    assert bus._stored.in_flight == 0
    await bus.close()


async def test_a_service_starts_without_a_bus_says_so_and_recovers_by_itself(
    own_stack: Stack,
) -> None:
    """(B02) Down at the start, up, down for longer, up: never a hang, never a restart."""
    await own_stack.do(own_stack.infra.kill("nats"))
    bus, health, port = Bus(own_stack.settings(), "test"), Health("test"), free_port()
    bus.answer("q.alive", Question, double)
    health.add("bus", bus.check)
    await health.serve(port)
    starting = asyncio.create_task(bus.start())
    await asyncio.sleep(1.5)
    assert await ask(port) == (False, "bus: Unavailable: bus: not connected yet")
    assert not starting.done()
    for down_s in (0.0, 4.0):
        if down_s:
            await own_stack.do(own_stack.infra.kill("nats"))
            await asyncio.sleep(down_s)
            began = time.monotonic()
            good, report = await ask(port)
            assert (good, "not connected" in report) == (False, True)
            with pytest.raises(Unavailable):
                await bus.store([Outgoing("x", b"")])
            assert time.monotonic() - began < 60, "never a hang"
        await own_stack.do(own_stack.infra.restart("nats"))
        async with asyncio.timeout(60):
            while not (await ask(port))[0]:
                await asyncio.sleep(0.05)
        await asyncio.wait_for(starting, 60)
        assert (await bus.request("q.alive", Question(number=4), Question)).number == 8
    await health.close()
    await bus.close()


async def test_many_small_messages_leave_no_pending_count_behind(stack: Stack) -> None:
    """(B05) 10,000 messages through a subscription with a small byte limit."""
    errors: list[Exception] = []

    async def note(exc: Exception) -> None:
        errors.append(exc)

    user = "scheduler"
    client = await nats.connect(
        stack.endpoints.nats_url, user=user, password=stack.endpoints.nats_users[user],
        error_cb=note,
    )  # fmt: skip
    done = 0

    async def take(_: Any) -> None:
        nonlocal done
        done += 1

    subscription = await client.subscribe("b05.*", cb=take, pending_bytes_limit=64 * 1024)
    await client.flush()
    for start in range(0, 10_000, 100):
        for number in range(start, start + 100):
            await client.publish(f"b05.{number}", b"x" * 100)
        await client.flush()
        while done < start + 100:
            await asyncio.sleep(0)
    assert subscription.pending_bytes == 0
    assert not [e for e in errors if isinstance(e, SlowConsumerError)]
    await client.close()


@pytest.mark.parametrize("for_good", [False, True])
async def test_a_bus_that_is_gone_is_closed_in_one_line(
    own_stack: Stack, caplog: pytest.LogCaptureFixture, for_good: bool
) -> None:
    """Whatever ended the service is what is told, not what closing stumbles over; a consumer
    waits for no answer then."""
    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    durable = await make_durable(bus)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    await bus.store(messages(durable, ["m"]))
    await recorder.until(1)
    await own_stack.do(own_stack.infra.kill("nats"))
    async with asyncio.timeout(60):
        while bus.client.is_connected:
            await asyncio.sleep(0.01)
    await bus.client.publish("t.late", b"written to a connection that is gone")
    if for_good:
        with contextlib.suppress(Exception):
            await bus.client.close()
        bus.closed.set()
        with pytest.raises(Unavailable, match="for good"):
            await bus.serve(asyncio.Event())
    await consumer.close(timeout_s=600)
    await bus.close()
    assert "ended without the server" in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_start_that_waits_for_the_bus_still_ends_when_told(own_stack: Stack) -> None:
    from shared.process import unless_stopped

    await own_stack.do(own_stack.infra.kill("nats"))
    bus, stop = Bus(own_stack.settings(), "test"), asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, stop.set)
    async with asyncio.timeout(60):
        assert not await unless_stopped(stop, bus.start())
        await bus.close()


async def test_a_refused_log_in_while_reconnecting_is_tried_again(own_stack: Stack) -> None:
    """What a node meets when the server is back before auth is."""
    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    right = bus.client.options["password"]
    bus.client.options["password"] = "wrong"
    await own_stack.do(own_stack.infra.restart("nats"))
    await asyncio.sleep(3.5)
    assert not bus.client.is_connected
    bus.client.options["password"] = right
    async with asyncio.timeout(60):
        while not bus.client.is_connected:
            await asyncio.sleep(0.05)
    assert not bus.closed.is_set()
    await bus.close()


async def test_wrong_credentials_are_an_outage_not_a_crash(stack: Stack) -> None:
    bus = Bus(Common(nats_url=stack.endpoints.nats_url, nats_user="scheduler",
                     nats_password="wrong"), "test")  # fmt: skip
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bus.start(), 1.5)
    with pytest.raises(Unavailable):
        await bus.check()
