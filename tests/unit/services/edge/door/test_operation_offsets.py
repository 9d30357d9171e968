"""An operation's frames say where they belong, so that a lost one is noticed."""

from __future__ import annotations

from schemas.exec import HEADER_OFFSET
from services.edge.door.calls import Call
from services.edge.door.operation import Operation
from shared.clock import SystemClock
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
