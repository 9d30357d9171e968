"""An operation's frames say where they belong, so that a lost one is noticed."""

from __future__ import annotations

from schemas.exec import HEADER_OFFSET, HEADER_SOURCE, LATE_BYTES
from services.edge.door.calls import Call
from services.edge.door.operation import Operation
from shared.clock import SystemClock
from tests.unit.services.edge.door.test_operation import Wire
from tests.unit.services.edge.frames import kind_of

CALL = Call("acme", "n1", "u", "exec", "p")


async def test_offsets_count_both_streams_and_the_end_counts_all() -> None:
    sent: list[tuple[str, str, bytes, str | None]] = []

    async def send(subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        sent.append((subject, kind_of(headers), data, (headers or {}).get(HEADER_OFFSET)))

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


async def test_a_little_output_that_is_in_no_hurry_stays_for_the_final_reply() -> None:
    wire = Wire()
    op = wire.operation()
    op.late = True
    await op.output("stdout", bytes(LATE_BYTES - 4))
    await op.output("stderr", b"four")
    assert wire.sent == [] and op.kept == {"stdout": bytes(LATE_BYTES - 4), "stderr": b"four"}
    await op.output("stderr", b"more")
    assert [(frame[1], frame[2], frame[3]) for frame in wire.sent] == [
        ("o", bytes(LATE_BYTES - 4), "0"), ("e", b"four", "4092"), ("e", b"more", "4096"),
    ]  # fmt: skip
    assert not any(op.kept.values())
    await op.output("stdout", b"x")
    assert wire.sent[-1][1:] == ("o", b"x", "4100")


async def test_who_joins_gets_what_stayed_behind() -> None:
    wire = Wire()
    op = wire.operation()
    op.late = True
    await op.output("stdout", b"early")
    await op.join("second", 0)
    assert ("second", "o", b"early", "0") in wire.sent
    await op.output("stdout", b"then")
    assert wire.sent[-1] == ("second", "o", b"then", "5")


async def test_frames_of_a_read_name_their_source_and_go_on_after_what_is_there() -> None:
    sent: list[dict[str, str]] = []

    async def send(subject: str, data: bytes, headers: dict[str, str] | None) -> None:
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

    async def send(subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        sent.append((kind_of(headers), data))

    for again, frames in ((False, [("r", b"")]), (True, [("r", b""), ("a", b"0")])):
        operation = Operation(
            CALL, "op", hash_=b"", reply_to="first", send=send, clock=SystemClock()
        )
        if again:
            operation.asked_again((0, 0))
        await operation.want_input()
        assert sent == frames
        sent.clear()
