"""The short way: it is taken, keeps order with the ordinary one, and leaves to that what
it is not made for."""

from __future__ import annotations

import asyncio

import pytest
from nats.aio.msg import Msg

from shared import ids, quick
from shared.bus import Bus

MANY = 500
WAIT_S = 60.0


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


async def test_a_taker_is_called_by_the_reader_itself(bus: Bus) -> None:
    subject, heard, tasks = f"test.{ids.new()}", Heard(2), []

    def take(message: Msg) -> None:
        tasks.append(asyncio.current_task())
        heard.take(message)

    await quick.subscribe(bus.client, subject, take)
    for body in (b"1", b"2"):
        assert quick.publish(bus.client, subject, body)
    await heard.everything()
    assert tasks == [bus.client._reading_task] * 2


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
