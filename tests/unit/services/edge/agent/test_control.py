"""Frames of terminals and signals: what goes to the agent, what is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.agent import wire
from services.edge.agent.commands import Defaults, control_frame, exec_payload
from services.edge.agent.wire import Fields, Msg, Tag
from services.edge.drivers.base import ExecSpec, Resize
from services.edge.drivers.fake import commands
from shared.errors import InvalidRequest, Unsupported

DEFAULTS = Defaults({}, "/", "root")
CELLS = st.integers(-(2**70), 2**70)


@given(rows=CELLS, cols=CELLS)
def test_a_size_is_sent_whole_or_refused(rows: int, cols: int) -> None:
    fits = 0 < rows < 1 << 16 and 0 < cols < 1 << 16
    spec = ExecSpec("op", argv=["true"], pty=Resize(rows, cols))
    if not fits:
        for refused in (lambda: control_frame(Resize(rows, cols)),
                        lambda: exec_payload(spec, DEFAULTS)):  # fmt: skip
            with pytest.raises(InvalidRequest) as caught:
                refused()
            assert caught.value.field == "pty"
        return
    type_, payload = control_frame(Resize(rows, cols))
    (frame,) = wire.FrameDecoder().feed(wire.frame(type_, 7, payload))
    assert (frame.type, frame.op_id) == (Msg.RESIZE, 7)
    assert struct.unpack("<HH", frame.payload) == (rows, cols)
    fields = Fields(exec_payload(spec, DEFAULTS))
    assert (fields.number(Tag.ROWS), fields.number(Tag.COLS)) == (rows, cols)


@given(rows=st.integers(1, 65535), cols=st.integers(1, 65535), cut=st.integers(1, 12))
def test_a_size_that_comes_in_pieces_is_one(rows: int, cols: int, cut: int) -> None:
    raw = wire.frame(*_with_id(control_frame(Resize(rows, cols))))
    decoder = wire.FrameDecoder()
    assert decoder.feed(raw[:cut]) == []
    assert decoder.feed(raw[cut:])[0].payload == struct.pack("<HH", rows, cols)


def _with_id(frame: tuple[int, bytes]) -> tuple[int, int, bytes]:
    return frame[0], 1, frame[1]


def test_without_a_terminal_none_is_asked_for() -> None:
    assert Tag.ROWS not in Fields(exec_payload(ExecSpec("op", argv=["true"]), DEFAULTS))


def test_signal_zero_is_sent_as_zero() -> None:
    """(E35)"""
    assert control_frame("0") == (Msg.SIGNAL, b"\0")


def test_a_session_has_no_terminal() -> None:
    spec = ExecSpec("op", shell="true", session="s", pty=Resize(1, 1))
    with pytest.raises(InvalidRequest):
        exec_payload(spec, DEFAULTS)


def test_the_fake_says_that_it_has_no_terminals() -> None:
    with pytest.raises(Unsupported) as caught:
        commands.check(ExecSpec("op", argv=["true"], pty=Resize(1, 1)))
    assert caught.value.field == "pty"
