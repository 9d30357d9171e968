"""Connections that begin in the sandbox: the agent listens, the edge takes them one by one.
The agent shares the loopback interface of the test."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from services.edge.agent import ports
from services.edge.agent.client import AgentClient
from services.edge.agent.handshake import CgroupFds
from shared.errors import Conflict
from tests.conformance.callers import Caller
from tests.conformance.harness import until
from tests.integration.guest.test_agent import agent
from tests.integration.guest.test_agent_ports import client, free_port, listening

__all__ = ["agent", "client"]  # fixtures

MIB = 1 << 20
WAIT_S = 60.0


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection from within, as soon as the agent listens."""
    async with asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                return await asyncio.open_connection("127.0.0.1", port)
            await asyncio.sleep(0.01)


async def accept(client: AgentClient, port: int, io: Caller) -> None:
    """As :func:`ports.accept`, for who does not ask when it listens."""
    await ports.accept(client, port, io, listens=asyncio.Event())


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_bytes_go_both_ways_and_each_direction_ends_by_itself(client: AgentClient) -> None:
    data, port = os.urandom(4 * MIB), free_port()
    io = Caller(*(data[at : at + MIB] for at in range(0, len(data), MIB)))
    task = asyncio.create_task(accept(client, port, io))
    reader, writer = await connect(port)
    writer.write(b"asked" * 1000)
    writer.write_eof()
    assert await asyncio.wait_for(reader.readexactly(len(data)), WAIT_S) == data
    await asyncio.wait_for(io.over.wait(), WAIT_S)
    assert bytes(io.got) == b"asked" * 1000 and not task.done()
    io.send(b"last", None)
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b"last"
    await asyncio.wait_for(task, WAIT_S)
    writer.close()


async def test_every_connection_is_taken_once_whoever_waits(client: AgentClient) -> None:
    port = free_port()
    ios = [Caller() for _ in range(4)]
    tasks = [asyncio.create_task(accept(client, port, io)) for io in ios]
    made = [await connect(port) for _ in range(3)]
    for number, (_, writer) in enumerate(made):
        writer.write(b"%d" % number)
    await until(lambda: sorted(bytes(io.got) for io in ios) == [b"", b"0", b"1", b"2"])
    assert sum(io.there.is_set() for io in ios) == 3
    for task in tasks:
        await ended(task)
    for reader, writer in made:
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(reader.read(), WAIT_S)
        writer.close()


async def test_connections_wait_for_an_edge_that_is_away(agent: Path) -> None:
    port = free_port()
    first = await AgentClient.connect(agent, cgroups=CgroupFds(), wait=True)
    task = asyncio.create_task(accept(first, port, Caller()))
    _, early = await connect(port)
    first.close()
    with contextlib.suppress(Exception):
        await task
    reader, writer = await connect(port)  # nobody takes it yet
    writer.write(b"hello")
    second = await AgentClient.connect(agent, cgroups=CgroupFds(), wait=True)
    io = Caller(b"here", None)
    taken = asyncio.create_task(accept(second, port, io))
    assert await asyncio.wait_for(reader.read(), WAIT_S) == b"here"
    await until(lambda: bytes(io.got) == b"hello")
    writer.close()
    await asyncio.wait_for(taken, WAIT_S)
    early.close()
    second.close()


async def test_it_is_said_when_it_listens(client: AgentClient) -> None:
    """A connection is not refused after that, however early it comes. An agent has 16 ports."""
    for _ in range(16):
        port, listens = free_port(), asyncio.Event()
        task = asyncio.create_task(ports.accept(client, port, Caller(), listens=listens))
        await asyncio.wait_for(listens.wait(), WAIT_S)
        with socket.create_connection(("127.0.0.1", port)):
            pass
        await ended(task)


async def test_a_port_that_is_taken_is_a_conflict(client: AgentClient) -> None:
    async def nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with listening(nothing) as port:
        with pytest.raises(Conflict) as caught:
            await accept(client, port, Caller())
    assert caught.value.field == "port"


async def test_it_listens_on_loopback_alone(client: AgentClient) -> None:
    port = free_port()
    task = asyncio.create_task(accept(client, port, Caller()))
    _, writer = await connect(port)
    lines = Path("/proc/net/tcp").read_text().splitlines()
    mine = [line.split()[1] for line in lines if line.split()[3] == "0A"]
    own = socket.inet_aton("127.0.0.1")[::-1].hex().upper()
    assert f"{own}:{port:04X}" in mine and f"00000000:{port:04X}" not in mine
    writer.close()
    await ended(task)
