"""Ports over the whole path: client, bus, edge, agent, what listens in a container."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from devstack.process import free_port
from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    InvalidRequest,
    NotFound,
    PortRefused,
    PortReset,
    Sandbox,
    SandboxDied,
    StdinClosed,
    sync,
)
from services.local import LocalSystem
from tests.e2e.conftest import open_client, until

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ARGS = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=256)
MIB = 1 << 20
WAIT_S = 60.0
REPOSITORY = Path(__file__).parents[2]

SERVER = """
import asyncio, os, socket, sys
async def echo(r, w):
    while data := await r.read(65536):
        w.write(data)
        await w.drain()
    w.close()
async def answer(r, w):
    data = await r.read()
    w.write(b"answer to " + data)
    w.close()
async def pour(r, w):
    for _ in range(64):
        w.write(bytes(1 << 20))
        await w.drain()
    w.close()
async def quit(r, w):
    await r.read(1)
    os._exit(9)
async def main():
    for port, serve in (7001, echo), (7002, answer), (7003, pour), (7004, quit):
        await asyncio.start_server(serve, "127.0.0.1", port)
    await asyncio.start_server(echo, "::1", 7006)
    await asyncio.Event().wait()
asyncio.run(main())
"""
WEB = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, code, body=b"", **headers):
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/host":
            self.answer(200, self.headers["Host"].encode())
        elif self.path.startswith("/to/"):
            self.answer(302, Location=self.path[4:])
        else:
            self.answer(200, self.path.encode())
    def do_POST(self):
        self.answer(200, self.rfile.read(int(self.headers["Content-Length"]))[::-1])
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def sandbox(container_system: LocalSystem) -> AsyncIterator[Sandbox]:
    async with open_client(container_system) as client:
        made = await client.run_container(ARGS, timeout=120)
        await made.spawn("python3", "-c", WEB, stdin=False)
        await made.spawn("python3", "-c", SERVER, stdin=False)
        for port in (7006, 8000):
            async with await made.connect(port, wait=WAIT_S):
                pass
        yield made
        await made.stop()


async def test_bytes_go_both_ways(sandbox: Sandbox) -> None:
    data = os.urandom(8 * MIB)
    async with await sandbox.connect(7001, wait=WAIT_S) as connection:
        sending = asyncio.create_task(connection.write(data))
        got = bytearray()
        while len(got) < len(data):
            got += await connection.read()
        await sending
        assert bytes(got) == data
        await connection.close_write()
        assert await connection.read() == b""
        with pytest.raises(StdinClosed):
            await connection.write(b"more")


async def test_a_direction_ends_by_itself(sandbox: Sandbox) -> None:
    connection = await sandbox.connect(7002)
    await connection.write(b"que")
    await connection.write(b"stion")
    await connection.close_write()
    assert b"".join([part async for part in connection]) == b"answer to question"


async def test_both_families_of_loopback_are_tried(sandbox: Sandbox) -> None:
    async with await sandbox.connect(7006) as connection:
        await connection.write(b"six")
        assert await connection.read() == b"six"


async def test_what_does_not_listen_is_refused_by_name(sandbox: Sandbox) -> None:
    with pytest.raises(PortRefused, match="port 7099") as caught:
        await sandbox.connect(7099)
    assert isinstance(caught.value, ConnectionRefusedError)
    assert isinstance(caught.value, NotFound) and caught.value.port == 7099
    for bad in (0, 65536, -1, True, "80"):
        with pytest.raises(InvalidRequest) as told:
            await sandbox.connect(bad)  # type: ignore[arg-type]
        assert told.value.field == "port"


async def test_a_service_that_comes_late_is_waited_for(sandbox: Sandbox) -> None:
    late = "sleep 1; exec python3 -m http.server 7010 --bind 127.0.0.1 --directory /etc"
    server = await sandbox.spawn(late, stdin=False)
    async with sandbox.port(7010, wait=WAIT_S) as address:
        url = f"http://{address}/passwd"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read())
    assert body.startswith(b"root:")
    await server.kill()
    begun = time.monotonic()
    with pytest.raises(PortRefused):
        async with sandbox.port(7011, wait=0.5):
            pass
    assert 0.5 <= time.monotonic() - begun < WAIT_S


async def test_a_local_address_takes_many_connections_at_once(sandbox: Sandbox) -> None:
    async def one(address: tuple[str, int], number: int) -> None:
        reader, writer = await asyncio.open_connection(*address)
        data = os.urandom(20_000 + number)
        writer.write(data)
        writer.write_eof()
        assert await reader.read() == data
        writer.close()

    async with sandbox.port(7001) as address:
        assert (address.host, str(address)) == ("127.0.0.1", f"127.0.0.1:{address.port}")
        for _ in range(2):
            await asyncio.gather(*(one(address, n) for n in range(50)))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)


async def test_a_local_connection_sees_what_the_sandboxes_end_did(sandbox: Sandbox) -> None:
    told: list[Exception] = []
    async with sandbox.port(7099, on_error=told.append) as address:
        reader, _ = await asyncio.open_connection(*address)
        with pytest.raises(ConnectionResetError):
            await reader.read()
    assert isinstance(told[0], PortRefused)
    async with sandbox.port(7002) as address:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"q")
        writer.write_eof()
        assert await reader.read() == b"answer to q"
        writer.close()


async def test_a_slow_reader_stops_the_sender(sandbox: Sandbox) -> None:
    async with await sandbox.connect(7003) as connection:
        first = await connection.read()
        await asyncio.sleep(1)
        held = sum(len(data) for _, data in connection._operation.output)
        assert held <= 512 * 1024
        total = len(first)
        async for data in connection:
            total += len(data)
        assert total == 64 * MIB


async def test_a_server_that_dies_ends_the_connection(containers: DSecClient) -> None:
    async with await containers.run_container(ARGS, timeout=120) as made:
        await made.spawn("python3", "-c", SERVER, stdin=False)
        idle = await made.connect(7001, wait=WAIT_S)
        doomed = await made.connect(7004, wait=WAIT_S)
        with pytest.raises(PortReset) as caught:
            await doomed.write(bytes(4 * MIB))  # unread: the kernel resets it
            while await doomed.read():
                pass
        assert isinstance(caught.value, ConnectionResetError) and caught.value.port == 7004
        assert await idle.read() == b""
        await idle.close()


async def test_a_sandbox_that_ends_takes_its_connections(containers: DSecClient) -> None:
    made = await containers.run_container(ARGS, timeout=120)
    await made.spawn("python3", "-c", SERVER, stdin=False)
    connection = await made.connect(7001, wait=WAIT_S)
    reading = asyncio.create_task(connection.read())
    await asyncio.sleep(0.1)
    await made.stop()
    with pytest.raises((SandboxDied, PortReset)):
        await asyncio.wait_for(reading, WAIT_S)
    with pytest.raises(SandboxDied):
        await made.connect(7001)


async def test_nothing_but_the_sandbox_is_reached(sandbox: Sandbox) -> None:
    """A listener of this machine on the same port is not the sandbox's."""
    with socket.create_server(("127.0.0.1", 0)) as here:
        here.settimeout(0.2)
        with pytest.raises(PortRefused):
            await sandbox.connect(here.getsockname()[1])
        with pytest.raises(TimeoutError):
            here.accept()


async def test_an_http_client_needs_no_listener(sandbox: Sandbox) -> None:
    async with sandbox.http(8000, wait=WAIT_S, headers={"x-a": "b"}) as web:
        assert (await web.get("/a?b=c")).text == "/a?b=c"
        assert (await web.get("/host")).text == "localhost:8000"
        data = os.urandom(2 * MIB)
        assert (await web.post("/", content=data)).content == data[::-1]
        many = await asyncio.gather(*(web.get(f"/{n}") for n in range(100)))
        assert [r.text for r in many] == [f"/{n}" for n in range(100)]
    async with sandbox.http(7002, timeout=httpx.Timeout(WAIT_S, read=0.5)) as mute:
        with pytest.raises(httpx.ReadTimeout):
            await mute.get("/")
    async with sandbox.http(8000) as web:
        with pytest.raises(httpx.ConnectError, match="port 7099"):
            await web.get("http://localhost:7099/")


async def test_a_redirect_leads_nowhere_else(sandbox: Sandbox) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    here = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=here.serve_forever, daemon=True).start()
    try:
        async with sandbox.http(8000, follow_redirects=True) as web:
            assert (await web.get("/to//there")).text == "/there"
            for host in ("localhost", "127.0.0.1"):
                with pytest.raises(httpx.ConnectError):
                    await web.get(f"/to/http://{host}:{here.server_port}/x")
            with pytest.raises(httpx.ConnectError, match="not this sandbox"):
                await web.get("/to/http://192.0.2.1/x")
    finally:
        here.shutdown()
        here.server_close()
    assert asked == []


async def test_the_synchronous_face_has_ports(
    sandbox: Sandbox, container_system: LocalSystem
) -> None:
    def work() -> None:
        system = container_system
        with sync.DSecClient(
            url=system.url, api_key=system.admin_key, project=system.project, keep=True
        ) as client:
            made = client.get(sandbox.id)
            with made.connect(7002) as connection:
                connection.write(b"q")
                connection.close_write()
                assert b"".join(connection) == b"answer to q"
            with made.port(7001) as address, socket.create_connection(address) as plain:
                plain.sendall(b"echo")
                assert plain.recv(10) == b"echo"
            with made.http(8000) as web:
                assert web.get("/x").text == "/x"
                assert web.post("/", content=b"abc").content == b"cba"
                with pytest.raises(httpx.ConnectError, match="port 7099"):
                    web.get("http://localhost:7099/")
            with pytest.raises(PortRefused):
                made.connect(7099)

    await asyncio.to_thread(work)


async def test_the_command_line_forwards_ports(
    sandbox: Sandbox, container_system: LocalSystem
) -> None:
    system = container_system
    environment = os.environ | {
        "DSEC_URL": system.url, "DSEC_API_KEY": system.admin_key,
        "DSEC_PROJECT": system.project, "PYTHONPATH": str(REPOSITORY),
    }  # fmt: skip
    local = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "libdsec", "forward", sandbox.id, "8000", f"7002:{local}", "7099",
        "--json", env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    try:
        said = b""
        while not said.rstrip().endswith(b"]"):
            part = await asyncio.wait_for(process.stdout.readline(), WAIT_S)
            assert part, (await process.stderr.read()).decode()
            said += part
        rows = {row["port"]: (row["host"], row["local"]) for row in json.loads(said)}
        url = f"http://{rows[8000][0]}:{rows[8000][1]}/y"
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=WAIT_S).read())
        assert (body, rows[7002]) == (b"/y", ("127.0.0.1", local))
        reader, _ = await asyncio.open_connection(*rows[7099])
        with pytest.raises(ConnectionResetError):
            await reader.read()
        line = await asyncio.wait_for(process.stderr.readline(), WAIT_S)
        assert b"port 7099" in line
    finally:
        process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), WAIT_S)
    assert code == 0


async def test_what_is_given_up_leaves_nothing(
    sandbox: Sandbox, container_system: LocalSystem
) -> None:
    async def open_ones() -> int:
        text = (await sandbox.exec("cat /proc/net/tcp")).text
        return sum(":1B59 " in line and " 01 " in line for line in text.splitlines())

    held = [await sandbox.connect(7001) for _ in range(3)]
    assert await open_ones() >= 3
    await held[0].abort()
    await held[1].close()
    async with open_client(container_system) as another:
        await (await another.get(sandbox.id)).connect(7001)  # goes with its client
    await held[2].close_write()
    assert await held[2].read() == b""

    async def gone() -> bool:
        return await open_ones() == 0

    await until(gone)
