"""The agent by itself, as a plain process: what it does with what it should not get."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.edge.agent import wire
from services.edge.agent.client import AgentClient
from services.edge.agent.commands import Defaults, exec_payload, run_command
from services.edge.agent.handshake import CgroupFds
from services.edge.agent.wire import Fields, Frame, FrameDecoder, Msg, Tag
from services.edge.drivers.base import ExecSpec
from shared.errors import Unavailable, Unsupported
from tests.conformance.harness import Recorder

AETHER = Path(
    os.environ.get("DSEC_TEST_AETHER", Path(__file__).parents[3] / "guest" / "build" / "aether")
)
DEFAULTS = Defaults({}, "/", "root")
HELLO = wire.frame(Msg.HELLO, 0, wire.MAGIC + wire.field(Tag.VERSION, wire.VERSION))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """The socket of a running agent without cgroups."""
    path = tmp_path / "agent.sock"
    process = subprocess.Popen([str(AETHER), str(path), "gen"], start_new_session=True)
    try:
        for _ in range(6000):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(path))
                break
            time.sleep(0.01)
        yield path
        assert process.poll() is None, "the agent died"
    finally:
        process.kill()
        process.wait()


class Raw:
    """A connection that says what it is told to."""

    def __init__(self, path: Path, *, hello: bool = True, setup: bool = True) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(path))
        self.decoder = FrameDecoder()
        self.frames: list[Frame] = []
        if hello:
            self.send(HELLO)
            assert self.next().type == Msg.HELLO
        if hello and setup:
            none = wire.field(Tag.V1_COUNT, 0) + wire.field(Tag.HAS_V2, 0)
            self.send(wire.frame(Msg.SETUP, 0, none + wire.field(Tag.HAS_OOM, 0)))
            assert self.next().type == Msg.OK

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def next(self) -> Frame:
        while not self.frames:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    def resident_kb(self) -> int:
        """Of the agent, which is who listens."""
        who = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", who)
        status = Path(f"/proc/{pid}/status").read_text()
        assert "aether" in status
        return int(status.split("VmRSS:")[1].split()[0])

    def ended(self) -> bool:
        try:
            while self.sock.recv(65536):
                pass
        except ConnectionResetError:
            pass
        except TimeoutError:
            return False
        return True

    def run(self, op_id: int, *, shell: str) -> Fields:
        self.send(wire.frame(Msg.EXEC, op_id, exec_payload(ExecSpec("k", shell=shell), DEFAULTS)))
        while True:
            got = self.next()
            if got.op_id == op_id and got.type in (Msg.RESULT, Msg.ERROR):
                return Fields(got.payload)


def test_an_unknown_version_is_refused_in_words(agent: Path) -> None:
    raw = Raw(agent, hello=False)
    raw.send(wire.frame(Msg.HELLO, 0, wire.MAGIC + wire.field(Tag.VERSION, 99)))
    assert Fields(raw.next().payload[4:]).number(Tag.VERSION) == wire.VERSION
    refused = raw.next()
    assert refused.type == Msg.ERROR and Fields(refused.payload).text(Tag.FIELD) == "version"
    assert raw.ended()


@pytest.mark.parametrize(
    "data",
    [
        wire.frame(Msg.LIST, 1),
        wire.frame(Msg.HELLO, 0, b"nope"),
        struct.pack("<I", 0),
        struct.pack("<I", 0xFFFFFFFF) + b"x" * 20,
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_who_does_not_greet_is_sent_away(agent: Path, data: bytes) -> None:
    raw = Raw(agent, hello=False)
    raw.send(data)
    assert raw.ended()


def test_commands_before_the_setup_are_refused(agent: Path) -> None:
    raw = Raw(agent, setup=False)
    assert raw.run(1, shell="true").text(Tag.CODE) == "unavailable"


def test_descriptors_must_be_those_announced(agent: Path) -> None:
    raw = Raw(agent, setup=False)
    raw.send(wire.frame(Msg.SETUP, 0, wire.field(Tag.V1_COUNT, 3)))
    assert Fields(raw.next().payload).text(Tag.FIELD) == "fds"


@pytest.mark.parametrize(
    "payload",
    [
        b"\x02",
        b"\x02\xff\xff\xff\xff",
        wire.field(Tag.SHELL, b"a\0b"),
        wire.field(Tag.SHELL, "a") + wire.field(Tag.ARGV, "b"),
        wire.field(Tag.SHELL, "a") + wire.field(Tag.ENV, "=x"),
        wire.field(Tag.SHELL, "a") + wire.field(Tag.ENV, "x"),
        wire.field(Tag.SHELL, "a") + wire.field(Tag.LIMIT, b"123"),
        wire.field(Tag.SHELL, "a") + wire.field(200, "x"),
        wire.field(Tag.SHELL, "a") + wire.field(Tag.SESSION, "n" * 200),
        b"",
    ],
)
def test_a_malformed_command_is_refused_and_nothing_else_ends(agent: Path, payload: bytes) -> None:
    raw = Raw(agent)
    raw.send(wire.frame(Msg.EXEC, 5, payload))
    refused = raw.next()
    assert (refused.type, refused.op_id) == (Msg.ERROR, 5)
    assert Fields(refused.payload).text(Tag.CODE) == "invalid_request"
    assert raw.run(6, shell="exit 3").number(Tag.EXIT_CODE) == 3


def test_an_operation_without_an_id_is_refused(agent: Path) -> None:
    raw = Raw(agent)
    raw.send(wire.frame(Msg.EXEC, 0, exec_payload(ExecSpec("k", shell="true"), DEFAULTS)))
    assert Fields(raw.next().payload).text(Tag.FIELD) == "op_id"


def test_answers_nobody_reads_hold_requests_up_and_nothing_else(agent: Path) -> None:
    """Within bounds; all of them come once somebody reads."""
    raw = Raw(agent)
    listing = wire.frame(Msg.LIST, 1)
    key = wire.field(Tag.KEY, "k" * 256) + wire.field(Tag.SHELL, "sleep 100")
    raw.send(b"".join(wire.frame(Msg.EXEC, n, key) for n in range(1, 101)))
    raw.sock.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        for _ in range(40_000):
            sent += raw.sock.send(listing)
    time.sleep(0.3)
    assert raw.resident_kb() < 20_000
    raw.sock.settimeout(60)
    for _ in range(sent // len(listing)):
        assert raw.next().type == Msg.LISTING
    raw.send(b"".join(wire.frame(Msg.KILL, n) for n in range(1, 101)))


def test_an_operation_id_in_use_is_a_conflict(agent: Path) -> None:
    raw = Raw(agent)
    payload = exec_payload(ExecSpec("k", shell="sleep 5"), DEFAULTS)
    raw.send(wire.frame(Msg.EXEC, 7, payload) * 2)
    assert Fields(raw.next().payload).text(Tag.CODE) == "conflict"
    raw.send(wire.frame(Msg.KILL, 7))
    assert raw.next().type == Msg.RESULT


def test_more_input_than_credit_ends_the_command(agent: Path) -> None:
    raw = Raw(agent)
    payload = exec_payload(ExecSpec("k", shell="sleep 30", stdin=True), DEFAULTS)
    raw.send(wire.frame(Msg.EXEC, 1, payload))
    chunk = wire.frame(Msg.DATA, 1, b"\0" + b"x" * 100_000)
    raw.send(chunk * 6)
    while (got := raw.next()).type == Msg.CREDIT:
        pass
    assert got.type == Msg.RESULT and Fields(got.payload).number(Tag.SIGNAL_NO) == 9


def test_more_operations_than_there_is_room_for_are_refused(agent: Path) -> None:
    raw = Raw(agent)
    payload = exec_payload(ExecSpec("k", shell="sleep 30"), DEFAULTS)
    for op_id in range(1, 258):
        raw.send(wire.frame(Msg.EXEC, op_id, payload))
    refused = raw.next()
    assert refused.op_id == 257
    assert Fields(refused.payload).text(Tag.CODE) == "capacity_exhausted"
    raw.send(b"".join(wire.frame(Msg.KILL, op_id) for op_id in range(1, 257)))
    done = {raw.next().op_id for _ in range(256)}
    assert done == set(range(1, 257))


def test_output_waits_in_bounds_for_a_reader_that_takes_nothing(agent: Path) -> None:
    """An endless writer and no credit: the agent's memory stays within the budget."""
    raw = Raw(agent)
    spec = ExecSpec("k", shell="yes", output_limit_bytes=4 << 20, timeout_s=1.0)
    raw.send(wire.frame(Msg.EXEC, 1, exec_payload(spec, DEFAULTS)))
    time.sleep(1.5)
    size = 0
    while size < wire.WINDOW_BYTES:
        size += len(raw.next().payload) - 1
    raw.sock.settimeout(0.5)
    with pytest.raises(TimeoutError):
        raw.next()
    assert size == wire.WINDOW_BYTES
    assert raw.resident_kb() < 20_000


async def test_a_second_connection_takes_the_place_of_the_first(agent: Path) -> None:
    none = CgroupFds()
    first = await AgentClient.connect(agent, generation="gen", cgroups=none)
    gone = asyncio.Event()
    first.on_lost(gone.set)
    second = await AgentClient.connect(agent, generation="gen")
    await asyncio.wait_for(gone.wait(), 60)
    io = Recorder()
    outcome = await run_command(second, ExecSpec("k", shell="echo here"), io, defaults=DEFAULTS)
    assert (outcome.exit_code, io.stdout) == (0, b"here\n")
    with pytest.raises(Unavailable):
        await first.list()
    second.close()


async def test_another_generation_is_not_this_sandbox(agent: Path) -> None:
    with pytest.raises(Unsupported):
        await AgentClient.connect(agent, generation="other")


async def test_nobody_listening_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await AgentClient.connect(tmp_path / "none.sock", deadline_s=1)
    with pytest.raises(Unavailable):
        await AgentClient.connect(tmp_path / "none.sock", deadline_s=0.1, wait=True)
