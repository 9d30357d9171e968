"""The agent's file operations by themselves: input that outlives a connection, bundles of
any content."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from libdsec._bundle import Entry, Unbundler, names, pack
from services.edge.agent import wire
from services.edge.agent.wire import Fields, FileOp, Msg, Tag
from tests.integration.guest.test_agent import Raw, agent

__all__ = ["agent"]

ROUNDS = 120
WITHIN_S = 60.0


def file_frame(op_id: int, op: FileOp, path: Path, *more: bytes) -> bytes:
    fields = wire.field(Tag.FOP, op) + wire.field(Tag.PATH, str(path))
    return wire.frame(Msg.FILE, op_id, b"".join((fields, wire.field(Tag.USER, "root"), *more)))


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def data_frames(op_id: int, data: bytes) -> bytes:
    pieces = (data[i : i + 60_000] for i in range(0, len(data), 60_000))
    stdin = bytes([wire.STDIN])
    return b"".join(wire.frame(Msg.DATA, op_id, stdin + piece) for piece in pieces)


def end(raw: Raw, op_id: int) -> tuple[int, Fields, bytes]:
    """How an operation ended, and its output, which is paid for."""
    out = b""
    while True:
        got = raw.next()
        if got.op_id != op_id:
            continue
        if got.type in (Msg.RESULT, Msg.ERROR):
            return got.type, Fields(got.payload), out
        if got.type == Msg.DATA:
            out += got.payload[1:]
            credit = got.payload[:1] + (len(got.payload) - 1).to_bytes(4, "little")
            raw.send(wire.frame(Msg.CREDIT, op_id, credit))


def bundle(raw: Raw, op_id: int, path: Path, data: bytes) -> tuple[int, Fields]:
    """Unpacks ``data``, at most a window long."""
    raw.send(file_frame(op_id, FileOp.UNPACK, path) + data_frames(op_id, data))
    raw.send(wire.frame(Msg.EOF, op_id))
    type_, fields, _ = end(raw, op_id)
    raw.send(wire.frame(Msg.ACK, op_id))
    return type_, fields


def listed(raw: Raw) -> dict[str, Fields]:
    raw.send(wire.frame(Msg.LIST, 999))
    while (got := raw.next()).type != Msg.LISTING:
        pass
    return {r.text(Tag.KEY): r for r in wire.split_records(got.payload, Tag.OP_ID)}


@pytest.mark.parametrize("op", [FileOp.WRITE, FileOp.UNPACK])
def test_input_with_a_key_goes_on_over_another_connection(
    agent: Path, tmp_path: Path, op: FileOp
) -> None:
    content = random.Random(3).randbytes(150_000)
    target = tmp_path / "made"
    data = content if op == FileOp.WRITE else pack(Entry("f", "f", 0o600, content=content))
    first = Raw(agent)
    first.send(file_frame(7, op, target, wire.field(Tag.KEY, "key")))
    first.send(data_frames(7, data[:70_000]))
    while first.next().type != Msg.CREDIT:
        pass
    first.sock.close()
    second = Raw(agent)
    known = listed(second)["key"]
    taken = known.number(Tag.TAKEN)
    assert 0 < taken <= 70_000 and known.text(Tag.STATE) == "running"
    assert not (target if op == FileOp.WRITE else target / "f").exists()
    second.send(wire.frame(Msg.ATTACH, 7) + data_frames(7, data[taken:]))
    second.send(wire.frame(Msg.EOF, 7))
    type_, fields, _ = end(second, 7)
    assert type_ == Msg.RESULT, fields.text(Tag.MESSAGE)
    made = target if op == FileOp.WRITE else target / "f"
    assert made.read_bytes() == content
    second.send(wire.frame(Msg.ACK, 7))
    assert listed(second) == {}


def test_input_without_a_key_ends_with_its_connection(agent: Path, tmp_path: Path) -> None:
    target = tmp_path / "dir/f"
    first = Raw(agent)
    first.send(file_frame(7, FileOp.WRITE, target) + data_frames(7, b"x" * 60_000))
    until(lambda: list(tmp_path.glob("dir/.dsec*")))
    first.sock.close()
    until(lambda: not list(target.parent.iterdir()))
    assert listed(Raw(agent)) == {}


def test_a_kill_of_what_goes_on_leaves_nothing(agent: Path, tmp_path: Path) -> None:
    target = tmp_path / "dir/f"
    first = Raw(agent)
    first.send(file_frame(7, FileOp.WRITE, target, wire.field(Tag.KEY, "key")))
    first.send(data_frames(7, b"x" * 60_000))
    until(lambda: list(tmp_path.glob("dir/.dsec*")))
    first.sock.close()
    second = Raw(agent)
    second.send(wire.frame(Msg.ATTACH, 7) + wire.frame(Msg.KILL, 7))
    assert end(second, 7)[0] == Msg.ERROR
    assert list(target.parent.iterdir()) == []


def test_any_bytes_in_place_of_a_bundle_write_nothing_outside(agent: Path, tmp_path: Path) -> None:
    rng, top = random.Random(11), tmp_path / "top"
    raw = Raw(agent)
    entries = [
        Entry("d", "a", 0o755), Entry("f", "a/b", 0o644, 10**18, content=b"x" * 900),
        Entry("l", "a/l", target="../../../etc"), Entry("h", "c", target="a/b"),
        Entry("f", "../escaped", content=b"x"), Entry("f", "/tmp/escaped-by-name", content=b"x"),
        Entry("h", "d", target="/etc/passwd"), Entry("x", "e"),
    ]  # fmt: skip
    for i in range(ROUNDS):
        data = bytearray(b"".join(pack(e) for e in rng.sample(entries, rng.randrange(1, 6))))
        for _ in range(rng.choice((0, 1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        cut = len(data) if rng.random() < 0.5 else rng.randrange(len(data))
        bundle(raw, 10 + i, top / str(i), bytes(data[:cut]))
    assert {p.name for p in tmp_path.iterdir()} <= {"agent.sock", "top"}
    assert not Path("/tmp/escaped-by-name").exists()
    assert not [p for p in top.rglob("*") if p.name.startswith(".dsec")]
    assert Raw(agent).run(5000, shell="exit 4").number(Tag.EXIT_CODE) == 4


def test_facts_are_told_without_contents_and_of_what_is_there(agent: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    (tmp_path / "l").symlink_to("nowhere")
    raw = Raw(agent)
    asked = names(["f", "missing", "l", "f/below"])
    raw.send(file_frame(7, FileOp.PACK, tmp_path, wire.field(Tag.LENGTH, 0)))
    raw.send(data_frames(7, asked) + wire.frame(Msg.EOF, 7))
    type_, _, out = end(raw, 7)
    found = [(e.kind, e.name, e.size, e.target, e.content) for e in Unbundler().feed(out)]
    assert type_ == Msg.RESULT
    assert found == [("f", "f", 5, "", b""), ("l", "l", 7, "nowhere", b"")]


def test_a_name_that_is_not_ended_is_refused(agent: Path, tmp_path: Path) -> None:
    raw = Raw(agent)
    raw.send(file_frame(7, FileOp.PACK, tmp_path) + data_frames(7, b"x"))
    raw.send(wire.frame(Msg.EOF, 7))
    type_, fields, _ = end(raw, 7)
    assert (type_, fields.text(Tag.ERRNO)) == (Msg.ERROR, "EBADMSG")


def test_an_operation_that_was_stopped_from_inside_ends_all_the_same(
    agent: Path, tmp_path: Path
) -> None:
    raw = Raw(agent)
    raw.send(file_frame(7, FileOp.WATCH, tmp_path, wire.field(Tag.RECURSIVE, 1)))
    assert raw.next().type == Msg.DATA  # it is ready
    (pid,) = watchers(tmp_path)
    os.kill(pid, signal.SIGSTOP)
    raw.send(wire.frame(Msg.KILL, 7))
    assert end(raw, 7)[0] == Msg.ERROR
    until(lambda: not Path(f"/proc/{pid}").exists())


def watchers(path: Path) -> set[int]:
    """The processes that watch a directory."""
    found, mark = set(), f" ino:{path.stat().st_ino:x} "
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with contextlib.suppress(OSError):
            if "inotify" in (text := info.read_text()) and mark in text:
                found.add(int(info.parts[2]))
    return found
