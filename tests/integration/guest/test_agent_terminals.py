"""Terminals of the agent at the level of frames."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import pytest

from services.edge.agent import wire
from services.edge.agent.commands import exec_payload
from services.edge.agent.wire import Fields, Msg, Tag
from services.edge.drivers.base import ExecSpec, Resize
from tests.integration.guest.test_agent import DEFAULTS, Raw, agent

__all__ = ["agent"]  # the fixture

SIZE = Resize(24, 80)


def begin(raw: Raw, shell: str, *, stdin: bool = True) -> None:
    spec = ExecSpec("k", shell=shell, pty=SIZE, stdin=stdin)
    raw.send(wire.frame(Msg.EXEC, 1, exec_payload(spec, DEFAULTS)))


def end(raw: Raw) -> tuple[bytes, Fields]:
    """What is shown until the result."""
    shown = b""
    while (got := raw.next()).type != Msg.RESULT:
        assert got.type in (Msg.DATA, Msg.CREDIT), got
        shown += got.payload[1:] if got.type == Msg.DATA else b""
    return shown, Fields(got.payload)


@pytest.mark.parametrize(
    "extra",
    [
        wire.field(Tag.ROWS, 24),
        wire.field(Tag.COLS, 80),
        wire.field(Tag.ROWS, 24) + wire.field(Tag.COLS, 1 << 16),
        wire.field(Tag.ROWS, 24) + wire.field(Tag.COLS, 80) + wire.field(Tag.SESSION, "s"),
    ],
)
def test_half_a_size_or_one_of_a_session_is_refused(agent: Path, extra: bytes) -> None:
    raw = Raw(agent)
    raw.send(wire.frame(Msg.EXEC, 1, wire.field(Tag.SHELL, "true") + extra))
    refused = raw.next()
    assert refused.type == Msg.ERROR
    assert Fields(refused.payload).text(Tag.FIELD) == "pty"


def test_malformed_sizes_change_nothing(agent: Path) -> None:
    raw = Raw(agent)
    begin(raw, "read x; stty size")
    for payload in (b"", b"\1", bytes(4), struct.pack("<HH", 0, 9), bytes(5), b"\xff" * 100):
        raw.send(wire.frame(Msg.RESIZE, 1, payload))
    raw.send(wire.frame(Msg.DATA, 1, b"\0\n"))
    shown, result = end(raw)
    assert shown.endswith(b"24 80\r\n") and result.number(Tag.EXIT_CODE) == 0


def test_a_size_for_what_has_no_terminal_is_ignored(agent: Path) -> None:
    raw = Raw(agent)
    payload = exec_payload(ExecSpec("k", shell="sleep .2; exit 3"), DEFAULTS)
    raw.send(wire.frame(Msg.EXEC, 1, payload))
    raw.send(wire.frame(Msg.RESIZE, 1, struct.pack("<HH", 9, 9)))
    raw.send(wire.frame(Msg.RESIZE, 77, struct.pack("<HH", 9, 9)))
    assert end(raw)[1].number(Tag.EXIT_CODE) == 3


def test_what_is_shown_keeps_to_its_credit_and_nothing_of_it_is_lost(agent: Path) -> None:
    raw = Raw(agent)
    begin(raw, "i=0; while [ $i -lt 90000 ]; do echo $i; i=$((i+1)); done; exit 5", stdin=False)
    time.sleep(2)
    shown = b""
    while len(shown) < wire.WINDOW_BYTES:
        shown += raw.next().payload[1:]
    assert len(shown) == wire.WINDOW_BYTES, "no more than its credit"
    raw.sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        raw.next()
    raw.sock.settimeout(60)
    raw.send(wire.frame(Msg.CREDIT, 1, b"\1" + struct.pack("<I", 1 << 20)))
    rest, result = end(raw)
    assert result.number(Tag.EXIT_CODE) == 5
    assert (shown + rest).split() == [b"%d" % i for i in range(90000)]


def test_the_end_of_input_may_come_more_than_once(agent: Path) -> None:
    raw = Raw(agent)
    begin(raw, "sleep 30")
    raw.send(wire.frame(Msg.EOF, 1) * 3)
    raw.send(wire.frame(Msg.KILL, 1))
    assert end(raw)[1].number(Tag.SIGNAL_NO) == 9


def test_who_attaches_is_told_of_the_room_for_input_and_shown_what_is_new(agent: Path) -> None:
    raw = Raw(agent)
    begin(raw, "stty -echo; echo on; read x; echo got $x")
    shown = b""
    while b"on" not in shown:
        got = raw.next()
        shown += got.payload[1:] if got.type == Msg.DATA else b""
    fresh = Raw(agent, setup=False)
    fresh.send(wire.frame(Msg.LIST, 9))
    (known,) = wire.split_records(fresh.next().payload, Tag.OP_ID)
    assert (known.number(Tag.TAKEN), known.number(Tag.ROWS)) == (0, 24)
    fresh.send(wire.frame(Msg.ATTACH, 1))
    credit = fresh.next()
    assert (credit.type, credit.payload) == (Msg.CREDIT, struct.pack("<BI", 0, wire.WINDOW_BYTES))
    fresh.send(wire.frame(Msg.DATA, 1, b"\0word\n"))
    assert end(fresh)[0] == b"got word\r\n"
