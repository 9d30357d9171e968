"""A hostile agent: whatever it sends, the edge answers with typed errors, within bounded
memory, and waits for nothing without end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.edge.agent import files, wire
from services.edge.agent.arriving import HELD_BYTES_MAX
from services.edge.agent.client import READ_BYTES, AgentClient
from services.edge.agent.commands import Defaults, resume_command, run_command
from services.edge.agent.wire import Fields, FrameDecoder, Msg, Tag
from services.edge.drivers.base import ExecOutcome, ExecSpec
from services.edge.drivers.files import FileInfo
from shared.errors import DsecError, InvalidRequest, Unavailable
from tests.conformance.harness import Recorder

DEFAULTS = Defaults({}, "/", "root")
HIGH_WATER_BYTES = 64 * 1024
Action = tuple[int, int, bytes] | bytes

BYTES = st.binary(max_size=40)
VALUES = BYTES | st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little"))
FIELDS = st.lists(st.tuples(st.sampled_from([int(t) for t in Tag]) | st.integers(0, 255), VALUES))
PAYLOADS = BYTES | FIELDS.map(lambda fs: b"".join(wire.field(t, v) for t, v in fs))
OUTPUT = st.tuples(st.integers(0, 3), BYTES).map(lambda p: bytes([p[0]]) + p[1])
FRAMES = st.tuples(
    st.sampled_from([int(m) for m in Msg]) | st.integers(0, 255), st.integers(0, 8), PAYLOADS
) | st.tuples(st.sampled_from([int(Msg.DATA), int(Msg.CREDIT)]), st.integers(1, 6), OUTPUT)
ACTIONS = st.lists(FRAMES | BYTES, max_size=30)


class Line(asyncio.Transport):
    """A transport whose other end never reads."""

    def __init__(self, client: AgentClient) -> None:
        super().__init__()
        self.client = client
        self.written = bytearray()
        self.ended = False

    def write(self, data: Any) -> None:
        if self.ended:
            return
        self.written += data
        if len(self.written) > HIGH_WATER_BYTES:
            self.client.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def abort(self) -> None:
        if not self.ended:
            self.ended = True
            asyncio.get_running_loop().call_soon(self.client.connection_lost, None)


def connected(hello: bytes = b"") -> tuple[AgentClient, Line]:
    client = AgentClient(Fields(hello), FrameDecoder(wire.FROM_AGENT_BYTES_MAX))
    line = Line(client)
    client.connection_made(line)
    return client, line


def receive(client: AgentClient, data: bytes) -> None:
    """Hands data to the client as the event loop does."""
    for at in range(0, len(data), READ_BYTES):
        part = data[at : at + READ_BYTES]
        client.get_buffer(-1)[: len(part)] = part
        client.buffer_updated(len(part))


async def endless() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0)
        yield b"i" * wire.CHUNK_BYTES


async def read_all(client: AgentClient) -> bytes:
    return b"".join([chunk async for chunk in files.read(client, "/f", user="root")])


async def listed(client: AgentClient) -> list[FileInfo]:
    return [info async for batch in files.list_dir(client, "/", user="root") for info in batch]


async def play(actions: list[Action]) -> list[Any]:
    """One operation of every kind, against an agent that does ``actions``."""
    client, line = connected(wire.field(Tag.NEXT_ID, 1))
    stdin = Recorder()
    stdin.stdin = endless()  # type: ignore[assignment]
    works = [
        run_command(client, ExecSpec("a", shell="x"), Recorder(), defaults=DEFAULTS),
        read_all(client),
        listed(client),
        files.stat(client, "/", user="root"),
        client.list(),
        files.write(client, "/w", endless(), user="root"),
    ]
    tasks = [asyncio.ensure_future(w) for w in works]
    await asyncio.sleep(0)
    for action in actions:
        data = action if isinstance(action, bytes) else wire.frame(*action)
        if not line.ended:
            receive(client, data)
        await asyncio.sleep(0)
        held = sum(op.held_bytes for op in client._ops.values())
        assert held <= HELD_BYTES_MAX * len(works)
    assert len(line.written) < 4 * wire.WINDOW_BYTES
    line.abort()
    async with asyncio.timeout(60):
        return await asyncio.gather(*tasks, return_exceptions=True)


@given(ACTIONS)
@example([(Msg.RESULT, 1, b"\x01")])
@example([(Msg.DATA, 1, b"\x07zz"), (Msg.RESULT, 1, b"")])
@example([(Msg.DATA, 3, wire.field(Tag.NAME, b"\xff") + b"\x01"), (Msg.RESULT, 3, b"")])
@example([(Msg.ERROR, 4, wire.field(Tag.ERRNO, b"\xff") + wire.field(Tag.FIELD, b"\xfe"))])
@example([(Msg.LISTING, 5, wire.field(Tag.OP_ID, 2**40))])
@example([(Msg.LISTING, 1, b"")])
@example([(Msg.RESULT, 5, b"")])
def test_whatever_an_agent_sends_operations_end_typed(actions: list[Action]) -> None:
    for outcome in asyncio.run(play(actions)):
        if isinstance(outcome, DsecError):
            text = [outcome.message, outcome.field or "", str(outcome.details)]
            "".join(text).encode()  # it can be told to a client
        else:
            assert isinstance(outcome, ExecOutcome | FileInfo | bytes | list), outcome


@given(st.binary(max_size=100) | PAYLOADS)
def test_whatever_an_agent_greets_with_ids_fit(hello: bytes) -> None:
    with contextlib.suppress(wire.ProtocolError):
        fields = Fields(hello)
        client = AgentClient(fields, FrameDecoder())
        wire.frame(Msg.LIST, client._open().id)
        wire.frame(Msg.LIST, client._open().id)


FLOODS: dict[str, Callable[[int], bytes]] = {
    "output": lambda i: wire.frame(Msg.DATA, 1, b"\x01" + bytes(1000)),
    "empty output": lambda i: wire.frame(Msg.DATA, 1, b"\x01") * 100,
    "both streams": lambda i: wire.frame(Msg.DATA, 1, bytes([1 + i % 2]) + b"x") * 10,
    "ends": lambda i: wire.frame(Msg.RESULT, 1, wire.field(Tag.NAME, bytes(100_000))),
    "errors": lambda i: wire.frame(Msg.ERROR, 1, wire.field(Tag.MESSAGE, bytes(100_000))),
    "credit": lambda i: wire.frame(Msg.CREDIT, 1, b"\0" + b"\xff" * 4),
    "half a frame": lambda i: b"\xff\xff\x0f\0" if i == 0 else bytes(1000),
}


class Stalled(Recorder):
    """A client that takes one piece of output and then nothing."""

    async def output(self, stream: Any, data: bytes) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_is_bounded_while_the_client_takes_nothing(flood: str) -> None:
    client, line = connected()
    spec = ExecSpec("a", shell="x", stdin=True)
    task = asyncio.ensure_future(run_command(client, spec, Stalled(), defaults=DEFAULTS))
    await asyncio.sleep(0)
    op = client._ops[1]
    for i in range(3000):
        if line.ended:
            break
        receive(client, FLOODS[flood](i))
        await asyncio.sleep(0)
    assert op.held_bytes <= HELD_BYTES_MAX + 100_000 and len(op.events) < 50
    assert len(client._decoder._buffer) <= wire.FROM_AGENT_BYTES_MAX + 1000
    assert len(line.written) < 2 * HIGH_WATER_BYTES
    line.abort()
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    assert task.done()


async def test_an_agent_that_does_not_read_is_sent_no_more() -> None:
    """Neither input nor credit piles up for it."""
    client, line = connected()
    spec = ExecSpec("a", shell="x", stdin=True)
    io = Recorder()
    task = asyncio.ensure_future(run_command(client, spec, io, defaults=DEFAULTS))
    for _ in range(20_000):
        if not line.ended:
            receive(client, wire.frame(Msg.DATA, 1, b"\x01x"))
        await asyncio.sleep(0)
    assert len(line.written) < 2 * HIGH_WATER_BYTES
    line.abort()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(task, 60)


async def test_small_pieces_of_a_slow_client_are_no_breach() -> None:
    """All of the credit in single bytes, of both streams, comes through whole."""
    client, line = connected()
    io, gate = Recorder(), asyncio.Event()
    take = io.output

    async def output(stream: Any, data: bytes) -> None:
        await gate.wait()
        await take(stream, data)

    io.output = output  # type: ignore[method-assign]
    task = asyncio.ensure_future(
        run_command(client, ExecSpec("a", shell="x"), io, defaults=DEFAULTS)
    )
    await asyncio.sleep(0)
    frame = wire.frame(Msg.DATA, 1, b"\x01o") + wire.frame(Msg.DATA, 1, b"\x02e")
    for _ in range(20):
        receive(client, frame * 1000)
        await asyncio.sleep(0)
    assert not line.ended
    receive(client, wire.frame(Msg.RESULT, 1, wire.field(Tag.EXIT_CODE, 0)))
    gate.set()
    outcome = await asyncio.wait_for(task, 60)
    assert (outcome.exit_code, io.stdout, io.stderr) == (0, b"o" * 20_000, b"e" * 20_000)


async def test_an_entry_without_end_is_refused() -> None:
    client, line = connected()
    task = asyncio.ensure_future(listed(client))
    await asyncio.sleep(0)
    entries = b"".join(wire.field(Tag.NAME, b"n") for _ in range(20_000))
    for _ in range(10):
        if not task.done() and 1 in client._ops:
            receive(client, wire.frame(Msg.DATA, 1, b"\x01" + entries))
        await asyncio.sleep(0.001)
    receive(client, wire.frame(Msg.RESULT, 1, b""))
    with pytest.raises(InvalidRequest):
        await asyncio.wait_for(task, 60)
    assert not line.ended


@given(st.lists(st.tuples(st.integers(60, 80), st.binary(max_size=30))), st.data())
def test_entries_are_the_same_however_they_are_cut(
    fields: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    entry = b"".join(wire.field(t, v) for t, v in [(int(Tag.NAME), b"first"), *fields])
    stream = (entry + wire.field(Tag.CONTENT, b"")) * 3
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    got: list[Fields] = []
    held = b""
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        held += stream[start:end]
        whole = wire.entries_end(held)
        got += wire.split_entries(held[:whole])
        held = held[whole:]
    assert held == b""
    assert [f._values for f in got] == [f._values for f in wire.split_entries(stream)]


async def test_who_answers_no_question_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.edge.agent.client.ANSWER_S", 0.01)
    client, _ = connected()
    with pytest.raises(Unavailable):
        await resume_command(client, "key", Recorder())  # type: ignore[arg-type]
