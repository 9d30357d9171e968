"""An operation's frames say where they belong, so that a lost one is noticed."""

from __future__ import annotations

from schemas.base import HEADER_FRAME
from schemas.exec import HEADER_OFFSET, HEADER_SOURCE
from services.edge.calls import Call
from services.edge.operation import Operation
from shared.clock import SystemClock

CALL = Call("acme", "n1", "u", "exec", "p")


async def test_offsets_count_both_streams_and_the_end_counts_all() -> None:
    sent: list[tuple[str, str, bytes, str | None]] = []

    async def send(subject: str, data: bytes, headers: dict[str, str]) -> None:
        sent.append((subject, headers[HEADER_FRAME], data, headers.get(HEADER_OFFSET)))

    operation = Operation(
        CALL, "op", hash_=b"", reply_to="first", send=send, clock=SystemClock()
    )
    await operation.output("stdout", b"abc")
    await operation.output("stderr", b"de")
    operation.received("w", b"3")
    await operation.finish(b"{}")
    assert [s[1:] for s in sent] == [("o", b"abc", "0"), ("e", b"de", "3"), ("x", b"{}", "5")]
    sent.clear()
    await operation.attach("second")
    assert sent == [("second", "e", b"de", "3"), ("second", "x", b"{}", "5")]


async def test_frames_of_a_read_name_their_source_and_go_on_after_what_is_there() -> None:
    sent: list[dict[str, str]] = []

    async def send(subject: str, data: bytes, headers: dict[str, str]) -> None:
        sent.append(headers)

    operation = Operation(
        CALL, "op", hash_=b"", reply_to="first", send=send, clock=SystemClock()
    )
    operation.have, operation.source = (70, 0), "this one"
    operation.goes_on()
    await operation.output("stdout", b"abc")
    assert (sent[0][HEADER_OFFSET], sent[0][HEADER_SOURCE]) == ("70", "this one")
    await operation.attach("second")
    assert sent[1] == sent[0]


async def test_who_asks_again_is_told_where_input_begins() -> None:
    sent: list[tuple[str, bytes]] = []

    async def send(subject: str, data: bytes, headers: dict[str, str]) -> None:
        sent.append((headers[HEADER_FRAME], data))

    for again, frames in ((False, [("r", b"")]), (True, [("r", b""), ("a", b"0")])):
        operation = Operation(
            CALL, "op", hash_=b"", reply_to="first", send=send, clock=SystemClock()
        )
        if again:
            operation.asked_again((0, 0))
        await operation.want_input()
        assert sent == frames
        sent.clear()
