"""Secrets in requests: real TLS on both ends, over sockets of this machine."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import h11
import pytest

from schemas.secret import GivenSecret
from services.edge.drivers.base import Secret
from services.edge.egress.certificates import Authority
from services.edge.egress.injecting import Change, Injector, changed
from services.edge.egress.sides import Traffic
from shared.errors import DsecError, Unavailable

VALUE = "s3cr3t-value-of-the-test"
BOUND = Secret("hub", ("api.test",), "dsec-secret-hub", "Authorization", "Bearer {}")
SHOWN = Secret("hub", ("api.test",), "dsec-secret-hub")
WITHIN_S = 30.0


@dataclass
class Outside:
    """A host of the world: what it was asked, as JSON in its answers."""

    asked: list[dict[str, str]] = field(default_factory=list)
    closes: bool = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = h11.Connection(h11.SERVER)
        body, headers, target = b"", dict[str, str](), ""
        try:
            while True:
                event = connection.next_event()
                if event is h11.NEED_DATA:
                    connection.receive_data(await reader.read(65536))
                elif isinstance(event, h11.Request):
                    headers = {n.decode(): v.decode() for n, v in event.headers}
                    target, body = event.target.decode(), b""
                    if headers.get("upgrade"):
                        return await self._upgraded(reader, writer)
                    if headers.get("expect"):
                        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    self.asked.append(headers)
                    self._answer(connection, writer, target, headers, len(body))
                    if self.closes:
                        return
                    connection.start_next_cycle()
                else:
                    return
        except (OSError, h11.ProtocolError):
            pass
        finally:
            writer.close()

    def _answer(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, target: str,
        headers: dict[str, str], size: int,
    ) -> None:  # fmt: skip
        told = json.dumps({"target": target, "headers": headers, "body_bytes": size}).encode()
        response = h11.Response(status_code=200, headers=[("Transfer-Encoding", "chunked")])
        for part in (response, h11.Data(data=told), h11.EndOfMessage()):
            writer.write(connection.send(part) or b"")

    async def _upgraded(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writer.write(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
        while data := await reader.read(65536):
            writer.write(data[::-1])


@dataclass
class Bench:
    """An injector between a client and :class:`Outside`. ``values`` are the present ones."""

    gate: Authority
    world: Authority
    values: Mapping[str, GivenSecret] | DsecError
    outside: Outside = field(default_factory=Outside)
    traffic: Traffic = field(default_factory=Traffic)
    bound: Secret = BOUND
    shows: str = "api.test"

    async def _given(self) -> Mapping[str, GivenSecret]:
        if isinstance(self.values, DsecError):
            raise self.values
        return self.values

    @asynccontextmanager
    async def connection(
        self, *, name: str = "api.test", secure: bool = True
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A client's connection through the injector."""
        loop = asyncio.get_running_loop()
        mine, inner = socket.socketpair()
        far, outer = socket.socketpair()
        for sock in (mine, inner, far, outer):
            sock.setblocking(False)
        context = self.world.inside(self.shows) if secure else None
        serving = asyncio.ensure_future(self._serve(far, context))
        injector = Injector([self.bound], self._given, self.gate)

        async def gate() -> None:
            first = await loop.sock_recv(inner, 65536)
            port = 443 if secure else 80
            try:
                await injector.relay(
                    inner, outer, first, name=name, port=port, traffic=self.traffic
                )
            finally:
                inner.close()
                outer.close()

        relaying = asyncio.ensure_future(gate())
        trust = ssl.create_default_context(cadata=self.gate.pem.decode()) if secure else None
        try:
            async with asyncio.timeout(WITHIN_S):
                reader, writer = await asyncio.open_connection(
                    sock=mine, ssl=trust, server_hostname=name if secure else None
                )
                yield reader, writer
        finally:
            mine.close()
            for task in (relaying, serving):
                task.cancel()
            await asyncio.gather(relaying, serving, return_exceptions=True)

    async def _serve(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        await self.outside.serve(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    async def ask(
        self, *headers: str, body: bytes = b"", host: str = "api.test", secure: bool = True,
        target: str = "/v1",
    ) -> tuple[int, str]:  # fmt: skip
        """Status and text of one request."""
        async with self.connection(secure=secure) as (reader, writer):
            writer.write(request(*headers, body=body, host=host, target=target))
            return await answer(reader)


def request(
    *headers: str, body: bytes = b"", host: str = "api.test", target: str = "/v1"
) -> bytes:
    lines = [f"POST {target} HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
    connection.send(h11.EndOfMessage())
    status, text = 0, b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            text += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage | h11.ConnectionClosed):
            return status, text.decode()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    world = Authority(tmp_path / "world.pem")
    (tmp_path / "roots.pem").write_bytes(world.pem)
    gate = Authority(tmp_path / "gate.pem", roots=tmp_path / "roots.pem")
    return Bench(gate, world, {"hub": GivenSecret(value=VALUE)})


async def test_a_header_is_put_in_and_replaces_what_was_there(bench: Bench) -> None:
    status, text = await bench.ask("Authorization: Bearer mine", "X-Other: stays")
    told = json.loads(text)
    assert status == 200 and told["target"] == "/v1"
    assert told["headers"]["authorization"] == f"Bearer {VALUE}"
    assert told["headers"]["x-other"] == "stays"


async def test_a_placeholder_becomes_the_value_in_headers_alone(bench: Bench) -> None:
    bench.bound = SHOWN
    basic = base64.b64encode(b"user:dsec-secret-hub").decode()
    status, text = await bench.ask(
        "X-Key: k=dsec-secret-hub;", f"Authorization: Basic {basic}", body=b"dsec-secret-hub"
    )
    told = json.loads(text)["headers"]
    assert status == 200 and told["x-key"] == f"k={VALUE};"
    assert base64.b64decode(told["authorization"].split()[1]) == f"user:{VALUE}".encode()
    assert json.loads(text)["body_bytes"] == len("dsec-secret-hub")
    assert bench.traffic.sent > len("dsec-secret-hub") and bench.traffic.received > len(text)


async def test_every_request_of_a_connection_gets_the_value_of_its_moment(bench: Bench) -> None:
    """A new value is used by the next request of a connection that is open."""
    async with bench.connection() as (reader, writer):
        for value in ("first", "second"):
            bench.values = {"hub": GivenSecret(value=value)}
            writer.write(request(body=b"x" * 200_000))
            status, text = await answer(reader)
            assert status == 200
            assert json.loads(text)["headers"]["authorization"] == f"Bearer {value}"
            assert json.loads(text)["body_bytes"] == 200_000


async def test_a_host_that_ends_an_idle_connection_is_heard(bench: Bench) -> None:
    bench.outside.closes = True
    async with bench.connection() as (reader, writer):
        writer.write(request())
        assert (await answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_a_body_that_waits_for_leave_gets_it(bench: Bench) -> None:
    async with bench.connection() as (reader, writer):
        writer.write(request("Expect: 100-continue", body=b"0123456789")[:-10])
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"0123456789")
        assert json.loads((await answer(reader))[1])["body_bytes"] == 10


async def test_an_upgraded_connection_carries_bytes_both_ways(bench: Bench) -> None:
    async with bench.connection() as (reader, writer):
        writer.write(request("Connection: upgrade", "Upgrade: x"))
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"abc")
        assert await reader.readexactly(3) == b"cba"


async def test_another_host_on_the_same_connection_gets_nothing(bench: Bench) -> None:
    for host, target in (("other.test", "/"), ("api.test", "http://other.test/")):
        status, text = await bench.ask(host=host, target=target)
        assert status == 421 and VALUE not in text
    assert bench.outside.asked == []


async def test_a_request_that_is_answered_with_itself_is_refused(bench: Bench) -> None:
    async with bench.connection() as (reader, writer):
        writer.write(request().replace(b"POST", b"TRACE"))
        status, text = await answer(reader)
    assert status == 405 and VALUE not in text and bench.outside.asked == []


async def test_without_tls_only_a_secret_that_may_goes_out(bench: Bench) -> None:
    status, text = await bench.ask(secure=False)
    assert status == 200 and "authorization" not in json.loads(text)["headers"]
    bench.values = {"hub": GivenSecret(value=VALUE, plain=True)}
    status, text = await bench.ask(secure=False)
    assert json.loads(text)["headers"]["authorization"] == f"Bearer {VALUE}"


async def test_a_host_whose_certificate_does_not_hold_gets_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    bench.shows = "other.test"
    status, text = await bench.ask()
    assert status == 502 and "certificate" in text and bench.outside.asked == []
    bench.shows, bench.world = "api.test", Authority(tmp_path / "stranger.pem")
    assert (await bench.ask())[0] == 502 and bench.outside.asked == []


async def test_a_secret_that_is_gone_or_cannot_be_had_fails_the_request(bench: Bench) -> None:
    for values in ({}, Unavailable("auth is away")):
        bench.values = values
        status, text = await bench.ask("X-Key: dsec-secret-hub")
        assert status == 502 and "secret" in text
    assert bench.outside.asked == []


async def test_what_is_no_http_gets_an_answer_and_no_way_out(bench: Bench) -> None:
    async with bench.connection() as (reader, writer):
        writer.write(b"\0\1\2 not http\r\n\r\n")
        assert (await answer(reader))[0] == 400
    assert bench.outside.asked == []


def test_the_authority_outlives_its_process_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "gate.pem"
    first = Authority(path)
    assert Authority(path).pem == first.pem
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"PRIVATE" not in first.bundle() and first.pem in first.bundle()


def test_hosts_and_ports_of_a_binding() -> None:
    bound = Secret("hub", ("api.test", "own.test:8443"), "p")

    async def none() -> Mapping[str, GivenSecret]:
        return {}

    injector = Injector([bound], none, None)  # type: ignore[arg-type]
    assert injector.takes("api.test", 443) and injector.takes("api.test", 80)
    assert injector.takes("own.test", 8443) and not injector.takes("own.test", 443)
    assert not injector.takes("sub.api.test", 443)


def test_two_secrets_do_not_touch_each_other() -> None:
    headers = [("Host", "x"), ("A", "p1 p2"), ("Authorization", "Basic !!")]
    asked = h11.Request(method="GET", target="/", headers=headers)
    made = changed(asked, [Change(b"p1", b"v1"), Change(b"p2", b"v2", b"b", b"<{}>")])
    assert dict(made.headers) == {
        b"host": b"x", b"a": b"v1 v2", b"authorization": b"Basic !!", b"b": b"<v2>",
    }  # fmt: skip
