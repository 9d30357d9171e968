"""The agent protocol's bytes: what goes in comes out, whatever the cuts."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.edge.agent import wire
from services.edge.agent.commands import Defaults, exec_payload, outcome_of, signal_number
from services.edge.agent.wire import FrameDecoder, Msg, ProtocolError, Tag
from services.edge.drivers.base import ExecSpec
from shared.errors import InvalidRequest

FRAMES = st.lists(
    st.tuples(st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8
)
HEADER = Path(__file__).parents[5] / "guest" / "aether" / "aether.h"


@given(FRAMES, st.data())
def test_frames_survive_any_cutting_of_the_stream(
    frames: list[tuple[int, int, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(wire.frame(*f) for f in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    decoder, got = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += decoder.feed(stream[start:end])
    assert [tuple(f) for f in got] == frames


@given(st.binary(max_size=400))
def test_no_bytes_make_the_decoder_do_anything_but_frames_or_refuse(data: bytes) -> None:
    try:
        frames = FrameDecoder().feed(data)
    except ProtocolError:
        return
    assert sum(9 + len(f.payload) for f in frames) <= len(data)


@pytest.mark.parametrize("length", [0, 4, wire.FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_a_frame_of_impossible_length_is_refused_at_once(length: int) -> None:
    with pytest.raises(ProtocolError):
        FrameDecoder().feed(struct.pack("<I", length))


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=100)), max_size=10))
def test_fields_come_back_in_order(fields: list[tuple[int, bytes]]) -> None:
    payload = b"".join(wire.field(tag, value) for tag, value in fields)
    assert list(wire.parse_fields(payload)) == fields


@given(st.binary(max_size=200))
def test_malformed_fields_are_refused(data: bytes) -> None:
    try:
        fields = list(wire.parse_fields(data))
    except ProtocolError:
        return
    assert sum(5 + len(value) for _, value in fields) == len(data)


@given(st.text(), st.integers(0, 2**64 - 1))
def test_text_and_numbers_come_back(text: str, number: int) -> None:
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    fields = wire.Fields(wire.field(Tag.PATH, text) + wire.field(Tag.SIZE, number))
    assert (fields.text(Tag.PATH), fields.number(Tag.SIZE)) == (text, number)


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(min_size=8, max_size=8)), max_size=20))
def test_fields_of_eight_bytes_are_numbers_and_texts(given: list[tuple[int, bytes]]) -> None:
    """A payload of such fields alone is taken apart at once."""
    fields = wire.Fields(b"".join(wire.field(tag, raw) for tag, raw in given))
    for tag, raw in dict(given).items():
        assert tag in fields
        assert fields.number(tag) == int.from_bytes(raw, "little")
        assert fields.text(tag) == raw.decode("utf-8", "surrogateescape")
        assert fields.shown(tag, 3) == raw.decode("utf-8", "replace")[:3]
    absent = next(tag for tag in range(256) if tag not in dict(given))
    assert absent not in fields and fields.number(absent, 7) == 7 and not fields.text(absent)


def test_names_that_are_not_utf8_keep_their_bytes() -> None:
    raw = b"/tmp/\xff\xfe"
    name = wire.Fields(wire.field(Tag.NAME, raw)).text(Tag.NAME)
    assert wire.field(Tag.NAME, name) == wire.field(Tag.NAME, raw)


def test_records_are_cut_at_their_first_tag() -> None:
    payload = b"".join(
        wire.field(Tag.NAME, name) + wire.field(Tag.SIZE, size)
        for name, size in (("a", 1), ("b", 2))
    )
    got = [(r.text(Tag.NAME), r.number(Tag.SIZE)) for r in wire.split_records(payload, Tag.NAME)]
    assert got == [("a", 1), ("b", 2)]


@pytest.mark.parametrize(("enum", "prefix"), [(Msg, "M_"), (Tag, "T_"), (wire.FileOp, "F_")])
def test_numbers_are_those_of_the_agent(enum: type[Msg], prefix: str) -> None:
    text = HEADER.read_text()
    numbers: dict[str, int] = {}
    for body in re.findall(r"enum \w+ \{(.*?)\};", text, re.S):
        at = -1
        for name, _, value in re.findall(r"(\w+)( = (\d+))?", body):
            at = int(value) if value else at + 1
            numbers[name] = at
    theirs = {m.name: numbers[prefix + m.name] for m in enum}
    assert theirs == {m.name: int(m) for m in enum}


def test_bounds_are_those_of_the_agent() -> None:
    text = HEADER.read_text()
    assert f"#define PROTO_VERSION {wire.VERSION}u" in text
    assert "#define FRAME_MAX (16u << 20)" in text and wire.FRAME_BYTES_MAX == 16 << 20
    assert "#define WINDOW (256u << 10)" in text and wire.WINDOW_BYTES == 256 << 10


DEFAULTS = Defaults({"A": "1"}, "/w", "agent")


def test_a_command_is_fields_and_never_text() -> None:
    spec = ExecSpec("k", shell="x", env={"B": "2"}, cwd="/tmp/a b", timeout_s=1.5)
    got = list(wire.parse_fields(exec_payload(spec, DEFAULTS)))
    assert (Tag.CWD, b"/tmp/a b") in got and (Tag.USER, b"agent") in got
    assert [v for t, v in got if t == Tag.ENV] == [b"A=1", b"B=2"]
    assert (Tag.TIMEOUT_NS, (1_500_000_000).to_bytes(8, "little")) in got


@pytest.mark.parametrize(
    "spec",
    [
        ExecSpec("k"),
        ExecSpec("k", argv=[]),
        ExecSpec("k", argv=["a"], shell="b"),
        ExecSpec("k", shell="a", env={"": "x"}),
        ExecSpec("k", shell="x" * (17 << 20)),
    ],
)
def test_a_bad_command_is_refused_before_it_is_sent(spec: ExecSpec) -> None:
    with pytest.raises(InvalidRequest) as caught:
        exec_payload(spec, DEFAULTS)
    assert caught.value.field in ("argv", "env.", "shell")


def test_an_outcome_names_its_signal() -> None:
    result = wire.field(Tag.EXIT_CODE, 137) + wire.field(Tag.SIGNAL_NO, 9) + wire.field(Tag.OOM, 1)
    outcome = outcome_of(wire.Fields(result))
    assert (outcome.exit_code, outcome.signal, outcome.oom_killed) == (137, "KILL", True)


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("SIGKILL", 9), ("0", 0), ("10", 10)])
def test_signals_by_name_or_number(name: str, number: int) -> None:
    assert signal_number(name) == number


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        signal_number("NOPE")


@given(st.lists(st.tuples(st.text("abc", min_size=1), st.integers(0, 99))), st.integers(0, 200))
def test_entries_are_whole_however_they_are_cut(entries: list[tuple[str, int]], cut: int) -> None:
    data = b"".join(
        wire.field(Tag.NAME, n) + wire.field(Tag.SIZE, s) + wire.field(Tag.CONTENT, b"")
        for n, s in entries
    )
    end = wire.entries_end(data[:cut])
    assert end <= cut and wire.entries_end(data) == len(data)
    found = [*wire.split_entries(data[:end]), *wire.split_entries(data[end:])]
    assert [(f.text(Tag.NAME), f.number(Tag.SIZE)) for f in found] == entries


def test_a_field_that_no_agent_sends_is_refused() -> None:
    with pytest.raises(wire.ProtocolError):
        wire.entries_end(b"\x46\xff\xff\xff\xff")
