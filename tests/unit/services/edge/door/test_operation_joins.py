"""Clients that join by the operation's id, commands of an earlier edge, terminals."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.exec import HANGUP_S
from services.edge.door.operation import RETAINED_BYTES, Operation
from services.edge.door.orders import SIGNALS
from services.edge.drivers.base import Resize
from shared.errors import InvalidRequest
from tests.unit.services.edge.door.test_operation import Wire


async def test_who_joins_gets_what_was_confirmed_too_and_the_other_is_told() -> None:
    wire = Wire()
    op = wire.operation()
    for data in (b"one", b"two", b"three"):
        await op.output("stdout", data)
    op.received("w", b"6")
    wire.sent.clear()
    await op.join("second", 3)
    told, *frames = wire.sent
    assert told[:2] == ("first", "x")
    assert json.loads(told[2])["error"]["code"] == "conflict"
    assert frames == [
        ("second", "k", b"", None), ("second", "o", b"two", "3"), ("second", "o", b"three", "6"),
    ]  # fmt: skip


async def test_what_is_retained_has_a_bound() -> None:
    wire = Wire()
    op = wire.operation()
    for _ in range(20):
        await op.output("stdout", bytes(RETAINED_BYTES // 8))
        op.received("w", str(1 << 40).encode())
    assert op.held_bytes <= RETAINED_BYTES
    wire.sent.clear()
    await op.join("second", 0)
    sent = [frame for frame in wire.sent if frame[1] == "o"]
    assert int(sent[-1][3] or 0) == 19 * (RETAINED_BYTES // 8) and len(sent) == 8


async def test_input_goes_on_where_the_first_client_left_it() -> None:
    wire = Wire()
    op = wire.operation()
    await op.want_input()
    op.received("i", b"abc", 0)
    wire.sent.clear()
    await op.join("second", 0)
    assert [frame[1:3] for frame in wire.sent if frame[0] == "second"] == [("r", b""), ("a", b"3")]
    op.received("i", b"def", 3)
    op.received("f", b"", 6)
    assert [chunk async for chunk in op.input()] == [b"abc", b"def"]


@given(
    parts=st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=40))),
    out=st.integers(0, 200), err=st.integers(0, 200),
)  # fmt: skip
def test_a_resumed_command_goes_on_after_what_the_client_has(
    parts: list[tuple[str, bytes]], out: int, err: int
) -> None:
    whole = {s: b"".join(d for of, d in parts if of == s) for s in ("stdout", "stderr")}
    out, err = min(out, len(whole["stdout"])), min(err, len(whole["stderr"]))
    wire = Wire()

    async def work() -> None:
        op = wire.operation()
        op.have = (out, err)
        await op.resumes(taken=0, terminal=False)
        for stream, data in parts:
            await op.output(stream, data)  # type: ignore[arg-type]
        await op.finish(b"")

    asyncio.run(work())
    got = {kind: b"".join(d for _, k, d, _ in wire.sent if k == kind) for kind in "oe"}
    assert got == {"o": whole["stdout"][out:], "e": whole["stderr"][err:]}
    at = out + err
    for _, _, data, offset in wire.sent:
        assert int(offset or 0) == at
        at += len(data)


async def test_a_resumed_terminal_shows_what_is_new_at_once() -> None:
    wire = Wire()
    op = wire.operation()
    op.have, op.takes_input = (100, 0), True
    await op.resumes(taken=7, terminal=True)
    await op.output("stdout", b"new")
    assert [f[1:] for f in wire.sent] == [
        ("r", b"", None), ("a", b"7", None), ("o", b"new", "100"),
    ]  # fmt: skip


async def test_input_that_came_with_the_request_is_resumed_after_what_was_taken() -> None:
    op = Wire().operation()
    op.takes_input = True
    op.preset(b"abcdef")
    await op.resumes(taken=2, terminal=False)
    assert [chunk async for chunk in op.input()] == [b"cdef"]


async def hangs_up(op: Operation, wire: Wire, *, answers: bool) -> bool:
    for _ in range(int(HANGUP_S) + 2):
        wire.clock.advance(1.0)
        await op.keep_alive(3.0)
        if answers and wire.sent and wire.sent[-1][1] == "k":
            op.received("w", b"0")
    return op.cancelled


@pytest.mark.parametrize("answers", [True, False])
async def test_a_silent_client_at_a_terminal_has_hung_up(answers: bool) -> None:
    wire = Wire()
    op = wire.operation()
    op.terminal = True
    assert await hangs_up(op, wire, answers=answers) is not answers


async def test_a_silent_client_elsewhere_may_be_silent() -> None:
    wire = Wire()
    assert not await hangs_up(wire.operation(), wire, answers=False)


async def test_sizes_keep_their_place_among_signals_and_only_the_newest_counts() -> None:
    op = Wire().operation()
    op.received("s", b"SIGTERM")
    for cols in range(1, 500):
        op.received("z", b"24 %d" % cols)
    op.received("s", b"HUP")
    taken: list[str | Resize] = []
    op.control_to(taken.append)
    assert taken == ["TERM", Resize(24, 499), "HUP"]
    op.received("z", b"1 1")
    assert taken[3:] == [Resize(1, 1)]


@given(frame=st.sampled_from("zs"), data=st.binary(max_size=24))
def test_any_bytes_are_a_size_a_signal_or_refused(frame: str, data: bytes) -> None:
    async def work() -> None:
        op = Wire().operation()
        try:
            op.received(frame, data)
        except InvalidRequest:
            return
        taken: list[str | Resize] = []
        op.control_to(taken.append)
        (order,) = taken
        if isinstance(order, Resize):
            assert 0 < order.rows < 1 << 16 and 0 < order.cols < 1 << 16
        else:
            assert order in SIGNALS

    asyncio.run(work())
