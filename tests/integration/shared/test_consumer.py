"""The batch consumer: nothing lost, nothing stuck, the guilty message alone delayed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from schemas.base import BadMessage, decode
from schemas.bus import DeadLetter
from schemas.subjects import dlq
from shared import pulling
from shared.bus import Bus
from shared.consumer import BACKOFF_MAX_S, BatchConsumer, backoff_s
from shared.errors import Conflict, Unavailable
from shared.topology import declare
from tests.integration.conftest import Stack
from tests.integration.shared.streams import (
    Recorder,
    make_durable,
    messages,
    settled,
    stored,
)  # fmt: skip

pytestmark = pytest.mark.integration


def numbered(count: int, prefix: str = "m") -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


async def test_everything_is_handled_once_in_batches_and_acknowledged(bus: Bus) -> None:
    durable = await make_durable(bus)
    await stored(bus, messages(durable, numbered(1000)))
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    await recorder.until(1000)
    await settled(bus, durable)
    await consumer.close()
    assert sorted(recorder.seen) == sorted(numbered(1000))
    assert len(recorder.batches) < 100
    assert consumer.handled == 1000


async def test_a_message_is_handled_when_it_comes_not_when_a_fetch_ends(bus: Bus) -> None:
    """The property for which hot paths do not use FastStream's batch pull: 50 messages
    one at a time take far less than 50 fetch time-outs, and none is stranded."""
    durable = await make_durable(bus)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    began = time.monotonic()
    for number in range(50):
        await bus.store(messages(durable, [f"m{number}"]))
        await recorder.until(number + 1)
    assert time.monotonic() - began < 25, "half of what waiting out each fetch would take"
    assert set(recorder.attempts.values()) == {1}
    await consumer.close()


async def test_no_message_falls_between_two_fetches(bus: Bus) -> None:
    """Messages keep coming for several fetch windows: each is delivered once."""
    durable = await make_durable(bus)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    for number in range(30):
        await asyncio.sleep(0.097)
        await bus.store(messages(durable, [f"m{number}"]))
        await recorder.until(number + 1)
    assert set(recorder.attempts.values()) == {1}, "none came a second time after ack_wait"
    await consumer.close()


async def test_nothing_that_was_asked_for_is_forgotten(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that nobody waits for any more would get a later message, and who asks
    next would wait for its end."""
    monkeypatch.setattr(pulling, "WAIT_S", 0.02)
    durable = await make_durable(bus)
    pull = pulling.Pull(bus.client, stream=durable.stream, durable=durable.name)
    await pull.open()

    async def waiting() -> int | None:
        return (await bus.js.consumer_info(durable.stream, durable.name)).num_waiting

    for number in range(20):
        assert await pull.next(10) == []
        assert not await waiting()
        await bus.store(messages(durable, [f"m{number}"]))
        (found,) = await pull.next(10)
        assert (found.data, await waiting()) == (b"m%d" % number, 0)
        await found.ack()
    await bus.store(messages(durable, numbered(3, "n")))
    coming = asyncio.create_task(pull.next(2))
    assert [len(await coming), len(await pull.next(2))] == [2, 1]
    await pull.close()


async def test_a_durable_that_is_not_there_is_an_outage(bus: Bus) -> None:
    durable = await make_durable(bus)
    pull = pulling.Pull(bus.client, stream=durable.stream, durable="nobody")
    await pull.open()
    with pytest.raises(Unavailable):
        await pull.next(10)
    await pull.close()


async def test_a_poison_message_delays_only_itself_and_ends_as_a_dead_letter(bus: Bus) -> None:
    await declare(bus.js)
    durable = await make_durable(bus, max_deliver=3)
    letters = await bus.client.subscribe(dlq(durable.stream))
    await bus.client.flush()
    bodies = numbered(100)

    def fails(body: str, _: int) -> Exception | None:
        return Conflict("no") if body == "m37" else None

    await bus.store(messages(durable, bodies))
    recorder = Recorder(fails)
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    await recorder.until(99)
    letter = decode((await letters.next_msg(60)).data, DeadLetter)
    await settled(bus, durable)
    await consumer.close()
    assert (letter.subject, letter.body, letter.deliveries) == (durable.filters[0], b"m37", 3)
    assert "Conflict" in letter.cause
    assert sorted(recorder.seen) == sorted(set(bodies) - {"m37"}), "each neighbour once"
    assert len(recorder.batches) < 60, "halving, not one by one"


async def test_an_unreadable_message_is_given_up_at_once(bus: Bus) -> None:
    await declare(bus.js)
    durable = await make_durable(bus)
    letters = await bus.client.subscribe(dlq(durable.stream))
    await bus.client.flush()
    await bus.store(messages(durable, ["bad"]))
    recorder = Recorder(lambda body, _: BadMessage("not JSON"))
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    letter = decode((await letters.next_msg(60)).data, DeadLetter)
    await settled(bus, durable)
    await consumer.close()
    assert (letter.deliveries, recorder.attempts["bad"]) == (1, 1)


async def test_an_outage_gives_nothing_up(bus: Bus) -> None:
    """More failed deliveries than ``max_deliver``, all for want of a database."""
    durable = await make_durable(bus, max_deliver=2)

    def fails(_: str, attempt: int) -> Exception | None:
        return Unavailable("database: away") if attempt <= 4 else None

    await bus.store(messages(durable, numbered(20)))
    recorder = Recorder(fails)
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    await recorder.until(20)
    await settled(bus, durable)
    await consumer.close()
    assert sorted(recorder.seen) == sorted(numbered(20))
    # more than that where a redelivery came with those that lagged behind
    assert min(recorder.attempts.values()) >= 5 > durable.max_deliver


async def test_long_work_that_reports_progress_is_not_delivered_again(bus: Bus) -> None:
    """(B07) A job that is longer than ``ack_wait``, with signs of life in between."""
    durable = await make_durable(bus, ack_wait_s=6)
    runs = 0

    async def long(batch: Any) -> None:
        nonlocal runs
        runs += 1
        for _ in range(16):
            await asyncio.sleep(0.5)
            for item in batch:
                await item.in_progress()

    await bus.store(messages(durable, ["m"]))
    consumer = BatchConsumer(bus, durable, long)
    consumer.start()
    await settled(bus, durable)
    delivered = (await bus.js.consumer_info(durable.stream, durable.name)).delivered
    await consumer.close()
    assert delivered is not None
    assert (runs, delivered.consumer_seq) == (1, 1)


async def test_two_consumers_share_and_a_dead_ones_messages_come_back(bus: Bus) -> None:
    durable = await make_durable(bus, ack_wait_s=1, batch=10)
    stuck, free = asyncio.Event(), Recorder()

    async def hang(batch: Any) -> None:
        stuck.set()
        await asyncio.sleep(3600)

    await bus.store(messages(durable, numbered(40)))
    dead = BatchConsumer(bus, durable, hang)
    dead.start()
    await stuck.wait()
    alive = BatchConsumer(bus, durable, free)
    alive.start()
    await free.until(30)
    await dead.close(timeout_s=0.05)
    await free.until(40)
    await settled(bus, durable)
    await alive.close()


async def test_a_close_finishes_the_batch_at_hand(bus: Bus) -> None:
    durable = await make_durable(bus)
    began, done = asyncio.Event(), False

    async def slow(batch: Any) -> None:
        nonlocal done
        began.set()
        await asyncio.sleep(0.5)
        done = True

    await bus.store(messages(durable, ["m"]))
    consumer = BatchConsumer(bus, durable, slow)
    consumer.start()
    await began.wait()
    await consumer.close()
    assert done
    await settled(bus, durable)


async def test_a_close_at_any_moment_loses_and_doubles_nothing(bus: Bus) -> None:
    """Consumers end while messages come, waiting and at work: each message is handled once,
    none comes only after ``ack_wait``, which is longer than this test may take."""
    durable = await make_durable(bus, ack_wait_s=600, batch=4)
    recorder = Recorder()
    stored_all = asyncio.Event()

    async def keep_coming() -> None:
        for number in range(400):
            await bus.store(messages(durable, [f"m{number}"]))
            await asyncio.sleep(0.002 * (number % 3))
        stored_all.set()

    coming = asyncio.create_task(keep_coming())
    number = 0
    while not stored_all.is_set() or len(set(recorder.seen)) < 400:
        assert not coming.done() or stored_all.is_set(), coming.exception()
        consumer = BatchConsumer(bus, durable, recorder)
        consumer.start()
        await asyncio.sleep(0.003 * (number % 7))
        await consumer.close()
        number += 1
    await coming
    await settled(bus, durable)
    assert set(recorder.attempts.values()) == {1}


async def test_a_close_waits_for_nothing_that_may_not_come(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulling, "WAIT_S", 600.0)
    durable = await make_durable(bus)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    await bus.store(messages(durable, ["m"]))
    await recorder.until(1)
    async with asyncio.timeout(60):
        while not (await bus.js.consumer_info(durable.stream, durable.name)).num_waiting:
            await asyncio.sleep(0.01)
        await consumer.close(timeout_s=600)


async def test_what_comes_when_nobody_waits_any_more_goes_to_others_at_once(bus: Bus) -> None:
    durable = await make_durable(bus, ack_wait_s=600)
    pull = pulling.Pull(bus.client, stream=durable.stream, durable=durable.name)
    await pull.open()
    waiting = asyncio.create_task(pull.next(10))
    async with asyncio.timeout(60):
        while not (await bus.js.consumer_info(durable.stream, durable.name)).num_waiting:
            await asyncio.sleep(0.01)
    pull.stop()
    assert await waiting == []
    assert await pull.close() == await pull.close() == []
    await bus.store(messages(durable, ["m"]))
    other = pulling.Pull(bus.client, stream=durable.stream, durable=durable.name)
    await other.open()
    async with asyncio.timeout(60):
        while not (found := await other.next(1)):
            pass
    assert (found[0].data, found[0].metadata.num_delivered) == (b"m", 2)
    await other.close()


async def test_a_durable_that_appears_late_is_consumed_without_a_restart(bus: Bus) -> None:
    durable = await make_durable(bus)
    await bus.js.delete_consumer(durable.stream, durable.name)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    with pytest.raises(Unavailable):
        async with asyncio.timeout(60):
            while True:
                await consumer.check()
                await asyncio.sleep(0.05)
    from shared.topology import consumer_config

    await bus.js.add_consumer(durable.stream, consumer_config(durable))
    await bus.store(messages(durable, ["m"]))
    await recorder.until(1)
    await consumer.check()
    await consumer.close()


@pytest.mark.parametrize("kill", [False, True])
async def test_consumption_goes_on_after_the_server_restarts(own_stack: Stack, kill: bool) -> None:
    """(B01) Several restarts, mid-fetch and mid-work; every message is handled."""
    bus = Bus(own_stack.settings(), "test")
    await bus.start()
    durable = await make_durable(bus, ack_wait_s=2)
    recorder = Recorder()
    consumer = BatchConsumer(bus, durable, recorder)
    consumer.start()
    total = 0
    for _ in range(4):
        await asyncio.sleep(0.2)  # a fetch is under way
        if kill:
            await own_stack.do(own_stack.infra.kill("nats"))
        await own_stack.do(own_stack.infra.restart("nats"))
        bodies = numbered(10, f"r{total}-")
        await stored(bus, messages(durable, bodies))
        total += 10
        await recorder.until(total)
    await settled(bus, durable)
    await consumer.close()
    await bus.close()


def test_the_backoff_grows_to_its_bound() -> None:
    delays = [backoff_s(n) for n in range(1, 40)]
    assert delays == sorted(delays)
    assert delays[0] == 0.1
    assert delays[-1] == BACKOFF_MAX_S


