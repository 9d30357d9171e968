"""Connections of the agent by itself: here it shares the loopback interface of the test,
whose listeners do everything that listeners do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from services.edge.agent import ports, wire
from services.edge.agent.client import AgentClient
from services.edge.agent.handshake import CgroupFds
from services.edge.agent.wire import Fields, Msg, Tag
from shared.errors import Conflict, DeadlineExceeded, NotFound
from tests.conformance.callers import Caller
from tests.conformance.harness import until
from tests.integration.guest.test_agent import AETHER, Raw, agent

__all__ = ["agent"]  # the fixture

MIB = 1 << 20
WAIT_S = 60.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def client(agent: Path) -> AsyncIterator[AgentClient]:
    made = await AgentClient.connect(agent, cgroups=CgroupFds(), wait=True)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def listening(serve: Serve, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[int]:
    server = await asyncio.start_server(serve, host, port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def free_port(low: bool = False) -> int:
    """A port without a listener; a ``low`` one is none that a connect would choose."""
    for port in range(20000, 30000):
        with socket.socket() as probe:
            if not low:
                probe.bind(("127.0.0.1", 0))
                return int(probe.getsockname()[1])
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no free port")


def agent_process(agent: Path) -> psutil.Process:
    found = [p for p in psutil.Process().children() if "aether" in p.name()]
    return max(found, key=lambda p: p.create_time())


async def test_megabytes_go_both_ways_at_once(client: AgentClient) -> None:
    data = os.urandom(8 * MIB)
    io = Caller(*(data[at : at + MIB] for at in range(0, len(data), MIB)), None)
    async with listening(echo) as port:
        await ports.dial(client, port, io)
    assert io.there.is_set() and io.over.is_set() and bytes(io.got) == data


async def test_each_direction_ends_by_itself(client: AgentClient) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # to the end of the question
        writer.write(b"answer to " + data)
        writer.close()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"first word")
        writer.write_eof()
        heard.append(await reader.read())
        writer.close()

    heard: list[bytes] = []
    async with listening(answer) as port:
        asked = Caller(b"que", b"stion", None)
        await ports.dial(client, port, asked)
        assert bytes(asked.got) == b"answer to question"
    async with listening(talk) as port:
        late = Caller()
        task = asyncio.create_task(ports.dial(client, port, late))
        await asyncio.wait_for(late.over.wait(), WAIT_S)
        assert bytes(late.got) == b"first word" and not task.done()
        late.send(b"last ", b"word", None)
        await asyncio.wait_for(task, WAIT_S)
        await until(lambda: heard == [b"last word"])


async def test_nothing_that_listens_is_named(client: AgentClient) -> None:
    port = free_port()
    with pytest.raises(NotFound, match=f"port {port}") as caught:
        await ports.dial(client, port, Caller(None))
    assert (caught.value.field, caught.value.details["errno"]) == ("port", "ECONNREFUSED")


async def test_a_late_listener_is_waited_for(client: AgentClient) -> None:
    port, io = free_port(low=True), Caller(b"hello", None)
    task = asyncio.create_task(ports.dial(client, port, io, wait_s=WAIT_S))
    await asyncio.sleep(0.3)
    assert not task.done()
    async with listening(echo, port=port):
        await asyncio.wait_for(task, WAIT_S)
    assert bytes(io.got) == b"hello"


async def test_waiting_ends(client: AgentClient) -> None:
    begun = time.monotonic()
    with pytest.raises(NotFound):
        await ports.dial(client, free_port(low=True), Caller(None), wait_s=0.3)
    assert 0.3 <= time.monotonic() - begun < WAIT_S


@pytest.mark.docker  # for root: the network is its own
async def test_waiting_never_meets_itself(tmp_path: Path) -> None:
    """A connect to one of the ports that connects choose can be answered by itself; here
    there are four, so that it happens."""
    path = tmp_path / "agent.sock"
    script = (
        "ip link set lo up; echo 40000 40003 >/proc/sys/net/ipv4/ip_local_port_range;"
        f"exec {AETHER} {path} gen"
    )
    process = await asyncio.create_subprocess_exec("unshare", "-n", "sh", "-c", script)
    try:
        client = await AgentClient.connect(path, cgroups=CgroupFds(), wait=True)
        for number in range(100):
            with pytest.raises(NotFound):
                await asyncio.wait_for(ports.dial(client, 40000 + number % 4, Caller(None)), WAIT_S)
        client.close()
    finally:
        process.kill()
        await process.wait()


async def test_a_listener_of_the_other_family_is_found(client: AgentClient) -> None:
    io = Caller(b"six", None)
    async with listening(echo, host="::1") as port:
        await ports.dial(client, port, io)
    assert bytes(io.got) == b"six"


async def test_a_full_backlog_has_an_end(
    client: AgentClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ports, "CONNECT_S", 0.5)
    with socket.socket() as deaf, contextlib.ExitStack() as held:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):
            one = held.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(deaf.getsockname())
        with pytest.raises(DeadlineExceeded) as caught:
            await ports.dial(client, deaf.getsockname()[1], Caller(None))
    assert (caught.value.field, caught.value.details["errno"]) == ("port", "ETIMEDOUT")


async def test_a_reset_is_told_from_an_end(client: AgentClient) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        sock: socket.socket = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with listening(die) as port:
        io = Caller(b"x")
        with pytest.raises(Conflict) as caught:
            await asyncio.wait_for(ports.dial(client, port, io), WAIT_S)
    assert (caught.value.field, caught.value.details["errno"]) == ("port", "ECONNRESET")
    assert not io.over.is_set()


async def test_what_came_before_the_other_end_closed_is_not_lost(client: AgentClient) -> None:
    """It answers and closes while we still send: the answer is there all the same."""

    async def curt(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.write(b"too large" * 1000)
        writer.write_eof()
        await writer.drain()
        await asyncio.sleep(0.2)
        writer.close()

    async with listening(curt) as port:
        io = Caller(*[b"x" * 65536] * 100, None)
        with contextlib.suppress(Conflict):
            await asyncio.wait_for(ports.dial(client, port, io), WAIT_S)
    assert bytes(io.got) == b"too large" * 1000


@pytest.mark.parametrize("ended", [False, True])
async def test_giving_up_resets_what_is_not_whole(client: AgentClient, ended: bool) -> None:
    seen: asyncio.Queue[bytes | Exception] = asyncio.Queue()
    heard = asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            await reader.readexactly(4)
        heard.set()
        try:
            seen.put_nowait(await reader.read())
        except ConnectionError as exc:
            seen.put_nowait(exc)
        await asyncio.sleep(0.5)
        writer.close()

    async with listening(listen) as port:
        io = Caller(b"part", *([None] if ended else []))
        task = asyncio.create_task(ports.dial(client, port, io))
        await asyncio.wait_for(heard.wait(), WAIT_S)
        end = await asyncio.wait_for(seen.get(), WAIT_S) if ended else None
        task.cancel()
        await asyncio.wait([task])
        end = await asyncio.wait_for(seen.get(), WAIT_S) if end is None else end
    assert end == b"" if ended else isinstance(end, ConnectionResetError)


async def test_a_slow_reader_holds_the_sender_and_no_memory(
    client: AgentClient, agent: Path
) -> None:
    sent = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        for _ in range(64):
            writer.write(b"y" * MIB)
            await writer.drain()
            sent += MIB
        writer.close()

    process = agent_process(agent)
    before = process.memory_info().rss
    async with listening(pour) as port:
        io = Caller(None)
        io.slow.clear()
        task = asyncio.create_task(ports.dial(client, port, io))
        await asyncio.sleep(1)
        assert sent < 16 * MIB
        assert process.memory_info().rss - before < 8 * MIB
        io.slow.set()
        await asyncio.wait_for(task, WAIT_S)
    assert len(io.got) == 64 * MIB


async def test_a_sender_is_held_by_a_slow_listener(client: AgentClient, agent: Path) -> None:
    go = asyncio.Event()
    total = 0

    async def sip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal total
        await go.wait()
        while data := await reader.read(65536):
            total += len(data)
        writer.close()

    process = agent_process(agent)
    before = process.memory_info().rss
    async with listening(sip) as port:
        io = Caller(*[b"z" * MIB] * 64, None)
        task = asyncio.create_task(ports.dial(client, port, io))
        await asyncio.sleep(1)
        assert io.sent < 16 * MIB
        assert process.memory_info().rss - before < 8 * MIB
        go.set()
        await asyncio.wait_for(task, WAIT_S)
    assert total == 64 * MIB


async def test_a_lost_edge_resets_connections_and_leaves_nothing(
    client: AgentClient, agent: Path
) -> None:
    broken = asyncio.Event()
    process = agent_process(agent)
    begun = process.num_fds()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(1)
            await reader.read()
        except ConnectionResetError:
            broken.set()
        writer.close()

    async with listening(hold) as port:
        held = [Caller(b"x") for _ in range(20)]
        tasks = [asyncio.create_task(ports.dial(client, port, io)) for io in held]
        await until(lambda: all(io.sent for io in held))
        await until(lambda: process.num_fds() == begun + 40)
        client.close()
        await asyncio.wait_for(broken.wait(), WAIT_S)
        await asyncio.gather(*tasks, return_exceptions=True)
    await until(lambda: process.num_fds() == begun - 1)  # and the edge's connection
    assert process.net_connections() == [] or all(
        c.family == socket.AF_UNIX for c in process.net_connections()
    )


async def test_many_connections_leave_nothing(client: AgentClient, agent: Path) -> None:
    process = agent_process(agent)
    begun = process.num_fds()

    async def one(number: int, port: int) -> None:
        data = str(number).encode() * 1000
        io = Caller(data, None)
        await ports.dial(client, port, io)
        assert bytes(io.got) == data

    async with listening(echo) as port:
        for _ in range(5):
            await asyncio.gather(*(one(n, port) for n in range(100)))
    await until(lambda: process.num_fds() == begun)
    assert await client.list() == []


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (b"", "port"),
        (wire.field(Tag.PORT, 0), "port"),
        (wire.field(Tag.PORT, 65536), "port"),
        (wire.field(Tag.PORT, (1 << 32) + 80), "port"),
        (wire.field(Tag.PORT, b"80"), "spec"),
        (wire.field(Tag.PORT, 80) + wire.field(Tag.USER, "12345678"), "spec"),
        (wire.field(Tag.PORT, 80)[:-1], "spec"),
    ],
)
def test_what_is_no_port_is_refused(agent: Path, payload: bytes, named: str) -> None:
    raw = Raw(agent)
    raw.send(wire.frame(Msg.DIAL, 1, payload))
    refused = raw.next()
    assert refused.type == Msg.ERROR
    assert Fields(refused.payload).text(Tag.FIELD) == named


def test_more_than_its_credit_ends_the_connection(agent: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        raw = Raw(agent)
        raw.send(wire.frame(Msg.DIAL, 1, wire.field(Tag.PORT, server.getsockname()[1])))
        assert raw.next().type == Msg.OK
        for _ in range(80):
            raw.send(wire.frame(Msg.DATA, 1, b"\0" + b"x" * wire.CHUNK_BYTES))
        while (got := raw.next()).type == Msg.CREDIT:
            pass
        assert got.type == Msg.ERROR
        assert Fields(got.payload).text(Tag.ERRNO) == "ECONNABORTED"
