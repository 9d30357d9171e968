"""The short way: it is taken, keeps order with the ordinary one, and leaves to that what
it is not made for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from shared import ids, quick
from shared.bus import Bus
from shared.settings import Common
from tests.integration.conftest import Stack

MANY = 500
WAIT_S = 60.0

pytestmark = pytest.mark.integration


class Heard:
    """What came, in order; ``all`` is set at ``count``."""

    def __init__(self, count: int) -> None:
        self.messages: list[Msg] = []
        self.all = asyncio.Event()
        self._count = count

    def take(self, message: Msg) -> None:
        self.messages.append(message)
        if len(self.messages) == self._count:
            self.all.set()

    async def everything(self) -> list[bytes]:
        await asyncio.wait_for(self.all.wait(), WAIT_S)
        return [m.data for m in self.messages]


async def test_small_messages_come_in_order_with_those_of_the_ordinary_way(bus: Bus) -> None:
    subject, heard = f"test.{ids.new()}", Heard(MANY)
    await quick.subscribe(bus.client, subject, heard.take)
    bodies = [str(n).encode() for n in range(MANY)]
    for n, body in enumerate(bodies):
        if n % 7 == 3:
            await bus.client.publish(subject, body, headers={"A": "b"})
        else:
            assert quick.publish(bus.client, subject, body, reply=f"to.{n}")
    assert await heard.everything() == bodies
    assert [m.reply for m in heard.messages[:3]] == ["to.0", "to.1", "to.2"]
    assert heard.messages[3].headers == {"A": "b"}


async def test_what_is_flushed_is_written_without_a_turn_of_the_loop(bus: Bus) -> None:
    subject, heard = f"test.{ids.new()}", Heard(2)
    await quick.subscribe(bus.client, subject, heard.take)
    assert quick.publish(bus.client, subject, b"now")
    quick.flush(bus.client)
    assert not bus.client._pending
    assert quick.publish(bus.client, subject, b"later")
    assert bus.client._pending
    assert await heard.everything() == [b"now", b"later"]


async def test_what_is_sent_at_once_takes_along_what_waits(bus: Bus) -> None:
    subject, heard = f"test.{ids.new()}", Heard(2)
    await quick.subscribe(bus.client, subject, heard.take)
    assert quick.publish(bus.client, subject, b"first")
    assert quick.publish(bus.client, subject, b"second", at_once=True)
    assert not bus.client._pending
    assert await heard.everything() == [b"first", b"second"]


async def test_a_taker_is_called_as_the_connection_is_read(bus: Bus) -> None:
    """By no task where the message is plain, else by the client's own reader."""
    subject, heard, tasks = f"test.{ids.new()}", Heard(3), []

    def take(message: Msg) -> None:
        tasks.append(asyncio.current_task())
        heard.take(message)

    await quick.subscribe(bus.client, subject, take)
    assert quick.publish(bus.client, subject, b"1")
    while not heard.messages:
        await asyncio.sleep(0)
    await bus.client.publish(subject, b"2", headers={"A": "b"})
    assert quick.publish(bus.client, subject, b"3")
    await heard.everything()
    reader = bus.client._reading_task
    assert tasks in ([None, reader, None], [None, reader, reader])


async def test_what_comes_in_pieces_beside_other_things_is_whole_and_in_order(bus: Bus) -> None:
    """Messages of another subscription, pings and large ones are among them."""
    mine, other = f"test.{ids.new()}", f"test.{ids.new()}"
    heard, beside, bodies = Heard(MANY), Heard(MANY // 5), []

    async def ordinary(message: Msg) -> None:
        beside.take(message)

    await quick.subscribe(bus.client, mine, heard.take)
    await bus.client.subscribe(other, cb=ordinary)
    for n in range(MANY):
        bodies.append(str(n).encode() * (1 if n % 9 else 20_000))
        await quick.send(bus.client, mine, bodies[-1], None)
        if n % 5 == 4:
            assert quick.publish(bus.client, other, b"")
        if n % 50 == 7:
            await bus.client.flush()
    assert await heard.everything() == bodies
    await beside.everything()
    assert [m.subject for m in heard.messages] == [mine] * MANY


async def test_an_end_of_the_subscription_ends_it_the_short_way_too(bus: Bus) -> None:
    subject, heard = f"test.{ids.new()}", Heard(2)
    made = await quick.subscribe(bus.client, subject, heard.take)
    again = await quick.subscribe(bus.client, subject, heard.take)
    await made.unsubscribe()
    for _ in range(2):
        assert quick.publish(bus.client, subject, b"")
    await heard.everything()
    await bus.client.flush()
    assert len(heard.messages) == 2
    await again.unsubscribe()


async def test_what_no_server_says_is_left_to_the_reader(bus: Bus) -> None:
    """Which tells what is wrong with it."""
    heard, subject = Heard(1), f"test.{ids.new()}"
    made = await quick.subscribe(bus.client, subject, heard.take)
    transport = bus.client._transport._io_writer.transport  # type: ignore[union-attr]
    ear = transport.get_protocol()
    good = f"MSG {subject} {made._id} 1\r\nx\r\n".encode()
    assert ear._take(good + good[:-1]) == len(good)
    odd = (b"", b"MSG", b"MSG \r\n", f"MSG {subject} {made._id} -9\r\n".encode(), b"PING\r\n",
           b"MSG a 9999 1\r\nx\r\n", f"MSG {subject} x 1\r\nx\r\n".encode(),
           b"MSG \xff 1 1\r\nx\r\n", good[:9])  # fmt: skip
    assert [ear._take(data) for data in odd] == [0] * len(odd)
    assert await heard.everything() == [b"x"]


async def lose_the_connection(settings: Common) -> list[bytes]:
    """What is heard before and after a connection that is lost."""
    client, subject, heard = Client(), f"test.{ids.new()}", Heard(4)
    back = asyncio.Event()

    async def reconnected() -> None:
        back.set()

    await client.connect(
        settings.nats_url, user=settings.nats_user, password=settings.nats_password,
        reconnect_time_wait=0.05, reconnected_cb=reconnected,  # type: ignore[arg-type]
    )  # fmt: skip
    await quick.subscribe(client, subject, heard.take)
    for body in (b"1", b"2"):
        await client.publish(subject, body)
    while len(heard.messages) < 2:
        await asyncio.sleep(0.001)
    client._transport._io_writer.transport.abort()  # type: ignore[union-attr]
    await asyncio.wait_for(back.wait(), WAIT_S)
    for body in (b"3", b"4"):
        await client.publish(subject, body)
        await client.flush()
    found = await heard.everything()
    protocol = client._transport._io_writer.transport.get_protocol()  # type: ignore[union-attr]
    assert isinstance(protocol, quick._Ear)
    await client.close()
    return found


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
async def test_another_connection_is_listened_to_as_the_first_one(
    stack: Stack, run: Callable[..., list[bytes]]
) -> None:
    found = await asyncio.to_thread(lambda: run(lose_the_connection(stack.settings())))
    assert found == [b"1", b"2", b"3", b"4"]


async def test_a_taker_that_fails_ends_nothing(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    subject, heard = f"test.{ids.new()}", Heard(1)

    def take(message: Msg) -> None:
        if message.data == b"bad":
            raise RuntimeError("no")
        heard.take(message)

    await quick.subscribe(bus.client, subject, take)
    for body in (b"bad", b"good"):
        assert quick.publish(bus.client, subject, body)
    assert await heard.everything() == [b"good"]
    assert f"a message on {subject}" in caplog.text


@pytest.mark.parametrize(
    ("subject", "data", "reply"),
    [
        ("a b", b"", ""), ("a\r\nPUB b 0\r\n\r\n", b"", ""), ("", b"", ""), ("a", b"", "b c"),
        ("a", bytes(quick.SMALL_BYTES + 1), ""),
    ],
    ids=["space", "line", "empty", "reply", "large"],
)  # fmt: skip
async def test_what_is_not_plain_is_left_to_the_ordinary_way(
    bus: Bus, subject: str, data: bytes, reply: str
) -> None:
    assert not quick.publish(bus.client, subject, data, reply=reply)


async def test_nothing_goes_the_short_way_without_a_server(bus: Bus) -> None:
    client = bus.client
    await bus.close()
    assert not quick.publish(client, "a", b"")


async def test_large_messages_come_whole_with_their_headers(bus: Bus) -> None:
    """In order with small ones, and those that are no longer plain."""
    subject, heard = f"test.{ids.new()}", Heard(4)
    await quick.subscribe(bus.client, subject, heard.take)
    body = bytes(range(256)) * 1024
    headers = {"Dsec-Frame": "o", "Dsec-Offset": "12"}
    assert await quick.publish_large(bus.client, subject, memoryview(body), headers=headers)
    assert quick.publish(bus.client, subject, b"small")
    assert await quick.publish_large(bus.client, subject, body[1:], headers=headers)
    for bad in ({"A b": "c"}, {"A": "b\r\nC: d"}, {"A": ""}, {"A": "b" * quick.HEADERS_BYTES}):
        assert not await quick.publish_large(bus.client, subject, body, headers=bad)
    await quick.send(bus.client, subject, body, {"A": "  b"})
    assert await heard.everything() == [body, b"small", body[1:], body]
    assert [m.headers for m in heard.messages] == [headers, None, headers, {"A": "b"}]
