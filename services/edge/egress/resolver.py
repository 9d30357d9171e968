"""Names to addresses, asked of the node's own resolvers.

Owns: questions to upstream servers: a socket of its own with a random port for each, TCP
where an answer is cut off. Does not own: who may ask what (:mod:`.dns`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype

from services.edge.egress.namespaces import Uplink
from shared.errors import Unavailable
from shared.policies.network import Address

ANSWER_S = 2.0
"""Of one server; then the next is asked."""
ANSWER_BYTES = 4096
RESOLV_CONF = Path("/etc/resolv.conf")
TTL_MAX_S = 3600


@dataclass(frozen=True, slots=True)
class Answer:
    """``addresses`` with the answer's shortest time to live in seconds."""

    rcode: int
    addresses: tuple[Address, ...] = ()
    ttl_s: int = 0


def servers_of(text: str) -> list[tuple[str, int]]:
    """``address[@port],…``; empty: what the node itself uses."""
    found: list[tuple[str, int]] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        address, _, port = part.partition("@")
        found.append((address, int(port or 53)))
    if found or text:
        return found
    try:
        lines = RESOLV_CONF.read_text().splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    return [(w[1], 53) for w in words if len(w) >= 2 and w[0] == "nameserver"]


class Resolver:
    """Asks ``servers`` in turn."""

    def __init__(self, uplink: Uplink, servers: Sequence[tuple[str, int]]) -> None:
        self._uplink, self._servers = uplink, servers

    async def ask(self, name: str, kind: int) -> Answer:
        """The addresses of ``name`` (``kind``: A or AAAA), whatever aliases lead there.
        Raises ``Unavailable`` where no server answers."""
        query = dns.message.make_query(name, dns.rdatatype.RdataType(kind))
        why = "no name server is known"
        for server in self._servers:
            try:
                async with asyncio.timeout(ANSWER_S):
                    return _read(await self._exchange(query, server), kind)
            except (OSError, TimeoutError, dns.exception.DNSException) as err:
                why = f"{server[0]}: {err!r}"
        raise Unavailable(f"the name is not resolved: {why}")

    async def _exchange(
        self, query: dns.message.Message, server: tuple[str, int]
    ) -> dns.message.Message:
        data = await self._datagram(query.to_wire(), server)
        answer = dns.message.from_wire(data, ignore_trailing=True)
        if answer.flags & dns.flags.TC:
            answer = dns.message.from_wire(await self._stream(query.to_wire(), server))
        if not query.is_response(answer):
            raise dns.exception.FormError
        return answer

    async def _datagram(self, data: bytes, server: tuple[str, int]) -> bytes:
        loop = asyncio.get_running_loop()
        with await self._uplink.socket(_family(server[0]), socket.SOCK_DGRAM) as sock:
            await loop.sock_connect(sock, server)
            await loop.sock_sendall(sock, data)
            while True:  # what answers another question is no answer
                got = await loop.sock_recv(sock, ANSWER_BYTES)
                if got[:2] == data[:2]:
                    return got

    async def _stream(self, data: bytes, server: tuple[str, int]) -> bytes:
        loop = asyncio.get_running_loop()
        with await self._uplink.socket(_family(server[0]), socket.SOCK_STREAM) as sock:
            await loop.sock_connect(sock, server)
            await loop.sock_sendall(sock, struct.pack(">H", len(data)) + data)
            size = struct.unpack(">H", await _exactly(sock, 2))[0]
            return await _exactly(sock, size)


async def _exactly(sock: socket.socket, size: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < size:
        more = await loop.sock_recv(sock, size - len(data))
        if not more:
            raise EOFError("the server closed the connection")
        data += more
    return data


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _read(answer: dns.message.Message, kind: int) -> Answer:
    found: list[Address] = []
    ttls: list[int] = []
    for rrset in answer.answer:
        ttls.append(min(rrset.ttl, TTL_MAX_S))
        if rrset.rdtype == kind:
            found += [ipaddress.ip_address(item.address) for item in rrset]
    return Answer(int(answer.rcode()), tuple(found), min(ttls, default=0))
