"""Following a command whose output has no end: all of it comes, however much there was."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from services.edge.agent import wire
from services.edge.agent.client import AgentClient
from services.edge.agent.commands import exec_payload, resume_command, run_command
from services.edge.agent.handshake import CgroupFds
from services.edge.agent.wire import Msg
from services.edge.drivers.base import ExecSpec
from tests.conformance.harness import Recorder, until
from tests.integration.guest.test_agent import DEFAULTS, Raw, agent

__all__ = ["agent"]

UNLIMITED = 1 << 40
LINE_BYTES = 64
MUCH = 2_200_000  # lines: 134 MiB, more than the agent keeps over all operations
SOME = 400_000  # lines: 24 MiB, more than it keeps of a stream
HELD_KB = 40_000


class Lines(Recorder):
    """Checks numbered lines as they come, and keeps none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def output(self, stream: Any, data: bytes) -> None:
        await self.gate.wait()
        start = -self.bytes % LINE_BYTES  # of the first whole line, then of the last one
        for at in (start, start + (len(data) - start) // LINE_BYTES * LINE_BYTES - LINE_BYTES):
            if start <= at:
                number = (self.bytes + at) // LINE_BYTES
                assert data[at : at + LINE_BYTES] == b"%063d\n" % number
        assert b"\0" not in data
        self.bytes += len(data)


def lines(count: int) -> str:
    return f"seq -f %063.0f 0 {count - 1}"


@pytest_asyncio.fixture
async def client(agent: Path) -> AsyncIterator[AgentClient]:
    made = await AgentClient.connect(agent, cgroups=CgroupFds())
    yield made
    made.close()


def spec(count: int, key: str = "k") -> ExecSpec:
    return ExecSpec(key, shell=lines(count), output_limit_bytes=UNLIMITED)


async def test_a_follower_gets_every_line_however_many(client: AgentClient) -> None:
    """(O01) Past everything that the agent may keep, in order, without a NUL."""
    io = Lines()
    outcome = await run_command(client, spec(MUCH), io, defaults=DEFAULTS)
    assert (outcome.exit_code, outcome.truncated) == (0, (0, 0))
    assert io.bytes == MUCH * LINE_BYTES


async def test_a_slow_follower_holds_the_command_up_and_loses_nothing(
    agent: Path, client: AgentClient
) -> None:
    """(O01) The command waits; its end waits for the last byte."""
    io = Lines()
    io.gate.clear()
    task = asyncio.ensure_future(run_command(client, spec(SOME), io, defaults=DEFAULTS))
    await asyncio.sleep(0.5)
    assert not task.done()
    io.gate.set()
    outcome = await asyncio.wait_for(task, 60)
    assert (outcome.exit_code, outcome.truncated, io.bytes) == (0, (0, 0), SOME * LINE_BYTES)


async def test_who_follows_again_is_told_where_what_is_left_begins(
    agent: Path, client: AgentClient
) -> None:
    """(O01) What another edge process took is gone but for its last part."""
    io = Lines()
    task = asyncio.ensure_future(run_command(client, spec(SOME), io, defaults=DEFAULTS))
    await until(lambda: io.bytes > 16 << 20)
    client.leaving = True
    client.close()
    await asyncio.wait({task})
    again = await AgentClient.connect(agent)
    base = (await again.list())[0].base[0]
    assert 0 < base < io.bytes
    rest = Lines()
    rest.bytes = base
    outcome = await resume_command(again, "k", rest)
    assert outcome is not None and outcome.exit_code == 0
    assert (rest.base, rest.bytes) == ((base, 0), SOME * LINE_BYTES)
    again.close()


def test_what_is_kept_of_a_command_without_a_budget_is_bounded(agent: Path) -> None:
    """Nobody reads: the command waits, and the agent's memory does not grow with it."""
    raw = Raw(agent)
    raw.send(wire.frame(Msg.EXEC, 1, exec_payload(spec(MUCH), DEFAULTS)))
    raw.sock.settimeout(60)
    for _ in range(2):
        assert raw.next().type == Msg.DATA
    raw.send(wire.frame(Msg.CREDIT, 1, b"\1" + struct.pack("<I", 1)))
    asyncio.run(asyncio.sleep(1.0))
    assert raw.resident_kb() < HELD_KB
    raw.send(wire.frame(Msg.KILL, 1))
