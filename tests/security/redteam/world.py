"""The outside of red-team tests: two network namespaces and the servers in one of them.

Owns: making and removing them. The gate connects from the one (``uplink``), the servers
are in the other; nothing of the machine's own network is touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset

from services.edge.egress.certificates import Authority
from services.edge.egress.namespaces import within

RESOLVER = "198.51.100.53"
HOSTS = {
    "good.test": ["198.51.100.10"], "files.good.test": ["198.51.100.11"],
    "bad.test": ["198.51.100.20"], "shared.test": ["198.51.100.10"],
    "inner.test": ["10.9.0.10"], "rebind.good.test": ["127.0.0.1", "10.9.0.10"],
    "own.good.test": ["198.51.100.1"], "six.good.test": ["2001:db8::10"],
    "mirror.test": ["198.51.100.12"], "slow.good.test": ["198.51.100.10"],
    "api.test": ["198.51.100.13"],
}  # fmt: skip
SERVICES = "pypi=mirror.test;npm=bad.test"
ADDRESSES = (
    "198.51.100.10/24", "198.51.100.11/24", "198.51.100.12/24", "198.51.100.13/24",
    "198.51.100.20/24",
    f"{RESOLVER}/24", "10.9.0.10/24", "2001:db8::10/64",
)  # fmt: skip
UPLINK_ADDRESSES = ("198.51.100.1/24", "10.9.0.1/24", "2001:db8::1/64")
PORTS = (80, 443, 853, 8080)
API, API_PORT, API_TLS_PORT = "api.test", 8081, 8443


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass
class World:
    """``reached``: connections that came, as (address, port). ``asked``: names of which
    the resolver was asked. A name's answer rotates through ``rotating``.
    ``heads``: requests that came to the host ``api.test``, whose authority is in ``roots``."""

    uplink: Path
    outside: Path
    resolver: str = RESOLVER
    reached: list[tuple[str, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    rotating: dict[str, list[str]] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    heads: list[str] = field(default_factory=list)
    roots: Path = Path("/nonexistent")

    async def api(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes requests without bodies and says nothing of what it got."""
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                self.heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
                await writer.drain()
        writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Says where it is, then gives back all it gets; ends when the other end does."""
        name = writer.get_extra_info("sockname")
        self.reached.append((name[0], name[1]))
        with contextlib.suppress(OSError):
            if name[1] not in (80, 443):
                writer.write(f"reached {name[0]}\n".encode())
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.write(b"\nend\n")
            await writer.drain()
        writer.close()

    def answer(self, data: bytes) -> bytes:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        self.asked.append(name)
        reply = dns.message.make_response(query)
        found = HOSTS.get(name)
        if name in self.rotating and question.rdtype == dns.rdatatype.A:
            found = [self.rotating[name][0]]
            self.rotating[name].append(self.rotating[name].pop(0))
        if found is None:
            reply.set_rcode(dns.rcode.NXDOMAIN)
        version = {dns.rdatatype.A: 4, dns.rdatatype.AAAA: 6}.get(question.rdtype)
        same = [a for a in found or [] if ipaddress.ip_address(a).version == version]
        if same:
            reply.answer.append(
                dns.rrset.from_text_list(question.name, 1, "IN", question.rdtype, same)
            )
        return reply.to_wire()


class _Resolver(asyncio.DatagramProtocol):
    def __init__(self, world: World) -> None:
        self._world = world

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(self._world.answer(data), addr)  # type: ignore[attr-defined]


def _listener(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    sock.listen(512)
    return sock


def _resolver() -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind((RESOLVER, 53))
    sock.setblocking(False)
    return sock


@asynccontextmanager
async def made_world(folder: Path) -> AsyncIterator[World]:
    """A world with its files in ``folder``; it is gone afterwards."""
    name = "dsec-t" + secrets.token_hex(3)
    up, out = f"{name}-up", f"{name}-out"
    world = World(Path("/var/run/netns", up), Path("/var/run/netns", out))
    world.roots = folder / "roots.pem"
    try:
        _wire(up, out)
        async with contextlib.AsyncExitStack() as stack:
            for family, every in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                for port in PORTS:
                    sock = within(
                        world.outside, lambda f=family, e=every, p=port: _listener(f, e, p)  # type: ignore[misc]
                    )
                    server = await asyncio.start_server(world.serve, sock=sock)
                    stack.callback(server.close)
            await _serve_api(world, stack, folder)
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_datagram_endpoint(
                lambda: _Resolver(world), sock=within(world.outside, _resolver)
            )
            stack.callback(transport.close)
            yield world
    finally:
        _unwire(up, out)


async def _serve_api(world: World, stack: contextlib.AsyncExitStack, folder: Path) -> None:
    authority = Authority(folder / "world.pem")
    world.roots.write_bytes(authority.pem)
    for port, context in ((API_PORT, None), (API_TLS_PORT, authority.inside(API))):
        sock = within(
            world.outside, lambda p=port: _listener(socket.AF_INET, "0.0.0.0", p)  # type: ignore[misc]
        )
        server = await asyncio.start_server(world.api, sock=sock, ssl=context)
        stack.callback(server.close)


def _unwire(*names: str) -> None:
    for one in names:
        subprocess.run(["ip", "netns", "del", one], check=False, capture_output=True)


def _wire(up: str, out: str) -> None:
    for one in (up, out):
        ip("netns", "add", one)
        ip("-n", one, "link", "set", "lo", "up")
    ip("-n", up, "link", "add", "wan", "type", "veth", "peer", "name", "wan", "netns", out)
    for one, addresses in ((up, UPLINK_ADDRESSES), (out, ADDRESSES)):
        for address in addresses:
            six = ["nodad"] if ":" in address else []
            ip("-n", one, "address", "add", address, "dev", "wan", *six)
        ip("-n", one, "link", "set", "wan", "up")
