"""A hostile edge: whatever frames it sends, an operation's caller gets bytes, a reply or a
typed error, and what waits for the caller is bounded."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from libdsec._door import Operations
from libdsec._flow import HELD_BYTES_MAX
from libdsec._operation import Operation
from libdsec._wire import (
    HEADER_FRAME,
    HEADER_OFFSET,
    WINDOW_BYTES,
    ExecReply,
    ExecRequest,
    encode,
)
from libdsec.errors import DSecError

COUNTS = st.integers(0, 2**70).map(str) | st.text(max_size=6) | st.just("9" * 5000)
REPLIES = st.builds(
    lambda code, text: encode({"v": 1, "op_id": "op", "error": {"code": code, "message": text}}),
    st.text(max_size=8) | st.just("conflict"), st.text(max_size=8),
)  # fmt: skip
BODIES = st.binary(max_size=40) | REPLIES | COUNTS.map(str.encode)
KINDS = st.sampled_from(["o", "e", "a", "r", "k", "x"]) | st.text(max_size=2)
FRAMES = st.lists(st.tuples(KINDS, BODIES, st.none() | COUNTS), max_size=25)


class Link:
    """A connection that takes everything and hears nothing."""

    is_up = True
    connection = "c"
    config = SimpleNamespace(principal="me")

    def subscribe(self, subject: str, call: Any) -> None:
        self.call = call

    async def publish(self, subject: str, data: bytes, **more: Any) -> None:
        await asyncio.sleep(0)


async def alive() -> DSecError | None:
    return None


async def begun(**facts: Any) -> tuple[Operation[ExecReply], Any]:
    link = Link()
    operations = Operations(link)  # type: ignore[arg-type]
    operation = Operation(
        operations, ("p", "n1", "u"), verb="exec",
        request=ExecRequest(op_id="0" * 26, shell="x", stdin=True), reply_type=ExecReply,
        verdict=alive, **facts,
    )  # fmt: skip
    await operation.start()

    async def say(kind: str, data: bytes, offset: str | None) -> None:
        headers = {HEADER_FRAME: kind, **({HEADER_OFFSET: offset} if offset is not None else {})}
        subject = f"dsec.out.v1.n1.me.c.{operation.token}"
        link.call(SimpleNamespace(subject=subject, data=data, headers=headers))

    return operation, SimpleNamespace(say=say, operations=operations)


async def play(frames: list[tuple[str, bytes, str | None]], joining: int | None) -> Any:
    operation, edge = await begun(joining=joining)
    try:
        for frame in frames:
            await edge.say(*frame)
            await asyncio.sleep(0)
        await edge.say("x", encode(ExecReply(op_id="op", exit_code=0)), None)
        if operation.done:
            return await operation.final()
        return None
    finally:
        edge.operations.close()


@given(FRAMES, st.none() | st.integers(0, 9))
@example([("o", b"a", "\u00b2")], None)
@example([("a", b"9" * 5000, None)], None)
@example([("x", b"[" * 9000, None)], None)
@example([("x", b"{}", "7")], 3)
def test_whatever_an_edge_sends_is_a_reply_or_a_typed_error(
    frames: list[tuple[str, bytes, str | None]], joining: int | None
) -> None:
    try:
        reply = asyncio.run(play(frames, joining))
    except DSecError:
        return
    assert reply is None or isinstance(reply, ExecReply)


async def test_an_edge_that_sends_more_than_the_window_is_refused() -> None:
    operation, edge = await begun()
    piece = bytes(WINDOW_BYTES // 8)
    for _ in range(100):
        await edge.say("o", piece, None)
    assert sum(len(data) for _, data in operation.output) <= HELD_BYTES_MAX
    with pytest.raises(DSecError):
        await operation.final()
    edge.operations.close()
