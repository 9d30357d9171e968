"""Frames, windows and what is sent again."""

from __future__ import annotations

import asyncio

import pytest

from schemas.base import HEADER_FRAME
from schemas.exec import CHUNK_BYTES, HEADER_OFFSET, WINDOW_BYTES
from services.edge.door import operation
from services.edge.door.calls import Call
from services.edge.door.operation import Operation
from shared.clock import FakeClock
from shared.errors import DeadlineExceeded, InvalidRequest
from tests.unit.services.edge.frames import kind_of

CALL = Call("team", "n1", "u1", "exec", "alice")


class Wire:
    """What was sent: (subject, frame, data, offset)."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, bytes, str | None]] = []
        self.clock = FakeClock()

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        self.sent.append((subject, kind_of(headers), data, (headers or {}).get(HEADER_OFFSET)))

    def operation(self) -> Operation:
        return Operation(CALL, "op", hash_=b"h", reply_to="first", send=self.send, clock=self.clock)

    def frames(self) -> str:
        return "".join(frame for _, frame, _, _ in self.sent)


async def test_output_is_cut_into_chunks_and_waits_for_room() -> None:
    wire = Wire()
    op = wire.operation()
    data = bytes(WINDOW_BYTES + 10)
    writing = asyncio.ensure_future(op.output("stdout", data))
    await asyncio.sleep(0.01)
    assert not writing.done()
    assert sum(len(d) for _, _, d, _ in wire.sent) == WINDOW_BYTES
    assert max(len(d) for _, _, d, _ in wire.sent) == CHUNK_BYTES
    op.received("w", b"5")  # too little room for a whole frame of ten
    await asyncio.sleep(0.01)
    assert not writing.done()
    op.received("w", b"10")
    await writing
    assert sum(len(d) for _, _, d, _ in wire.sent) == len(data)


async def test_one_that_is_cancelled_before_it_begins_still_ends() -> None:
    op = Wire().operation()
    ends: list[bool] = []

    async def work() -> None:
        try:
            op.enter()
        except asyncio.CancelledError:
            ends.append(op.cancelled)

    op.task = asyncio.create_task(work())
    op.cancel()
    await asyncio.wait_for(op.task, 60)
    assert ends == [True]


async def test_a_reader_that_takes_nothing_ends_the_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operation, "STALL_S", 0.02)
    op = Wire().operation()
    with pytest.raises(DeadlineExceeded):
        await op.output("stdout", bytes(WINDOW_BYTES + 1))


async def test_confirming_more_than_was_sent_opens_no_window() -> None:
    wire = Wire()
    op = wire.operation()
    await op.output("stdout", b"abc")
    op.received("w", b"999999999")
    writing = asyncio.ensure_future(op.output("stdout", bytes(WINDOW_BYTES + 1)))
    await asyncio.sleep(0.01)
    assert not writing.done()
    writing.cancel()


async def test_a_client_that_comes_back_is_sent_what_it_did_not_confirm() -> None:
    wire = Wire()
    op = wire.operation()
    for data in (b"one", b"two", b"three"):
        await op.output("stdout", data)
    op.received("w", b"4")  # all of the first frame, a part of the second
    wire.sent.clear()
    await op.attach("second")
    assert wire.sent == [("second", "o", b"two", "3"), ("second", "o", b"three", "6")]
    await op.finish(b"final")
    assert wire.sent[-1] == ("second", "x", b"final", "11")
    wire.sent.clear()
    await op.attach("third")
    assert [s[1:3] for s in wire.sent] == [("o", b"two"), ("o", b"three"), ("x", b"final")]


async def test_input_comes_in_order_and_is_counted() -> None:
    wire = Wire()
    op = wire.operation()
    await op.want_input()
    op.received("i", b"ab")
    op.received("i", b"c")
    op.received("f", b"")
    assert [chunk async for chunk in op.input()] == [b"ab", b"c"]
    assert wire.sent[0][1] == "r" and wire.sent[-1][1:3] == ("a", b"3")


async def test_after_attaching_again_input_goes_on_where_it_was_taken() -> None:
    wire = Wire()
    op = wire.operation()
    await op.want_input()
    op.received("i", b"taken")
    chunks = op.input()
    assert await anext(chunks) == b"taken"
    op.received("i", b"lost with the connection")
    await op.attach("second")
    assert wire.sent[-1][1:3] == ("a", b"5")
    op.received("i", b"again")
    op.received("f", b"")
    assert [chunk async for chunk in chunks] == [b"again"]


@pytest.mark.parametrize(
    ("frame", "data", "field"),
    [
        ("i", bytes(CHUNK_BYTES + 1), "stdin"), ("s", b"SEGFAULT", "signal"),
        ("w", b"many", "count"), ("y", b"", HEADER_FRAME), ("", b"", HEADER_FRAME),
    ],
)  # fmt: skip
async def test_frames_that_break_the_rules(frame: str, data: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Wire().operation().received(frame, data)
    assert caught.value.field == field


async def test_input_beyond_the_window_or_its_end_is_refused() -> None:
    op = Wire().operation()
    for _ in range(WINDOW_BYTES // CHUNK_BYTES):
        op.received("i", bytes(CHUNK_BYTES))
    with pytest.raises(InvalidRequest):
        op.received("i", b"x")
    short = Wire().operation()
    short.received("f", b"")
    with pytest.raises(InvalidRequest, match="after its end"):
        short.received("i", b"x")


async def test_a_silent_operation_gives_signs_of_life_until_it_ends() -> None:
    wire = Wire()
    op = wire.operation()
    await op.keep_alive(3.0)
    assert wire.frames() == ""
    wire.clock.advance(3.0)
    await op.keep_alive(3.0)
    await op.keep_alive(3.0)
    assert wire.frames() == "k"
    await op.finish(b"")
    wire.clock.advance(9.0)
    await op.keep_alive(3.0)
    assert wire.frames() == "kx"


async def test_a_hole_in_the_input_is_never_passed_on() -> None:
    """Frames are lost with a connection; the client attaches again after a silence."""
    wire = Wire()
    op = wire.operation()
    await op.want_input()
    op.received("i", b"abc", 0)
    op.received("i", b"bcd", 1)  # came twice, but for its end
    op.received("i", b"lost are e and f", 6)
    op.received("f", b"", 22)
    chunks = op.input()
    assert [await anext(chunks), await anext(chunks)] == [b"abc", b"d"]
    following = asyncio.ensure_future(anext(chunks, None))
    wire.clock.advance(60.0)
    wire.sent.clear()
    await op.keep_alive(3.0)
    assert not following.done() and "k" not in wire.frames()
    await op.attach("second")
    assert wire.sent[-1][1:3] == ("a", b"4")
    op.received("i", b"ef", 4)
    op.received("f", b"", 6)
    assert await following == b"ef"
    assert await anext(chunks, None) is None


async def test_input_that_came_with_the_request_survives_an_attach() -> None:
    op = Wire().operation()
    op.preset(b"whole")
    await op.attach("second")
    assert [chunk async for chunk in op.input()] == [b"whole"]
