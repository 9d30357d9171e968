"""The name server of a sandbox against one that asks without end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import dns.message
import dns.rcode
import pytest

from services.edge.egress import dns as nameserver
from services.edge.egress.dns import Lookup, NameServer
from services.edge.egress.resolver import Answer

QUERY = dns.message.make_query("a.example", "A").to_wire()


class Field:
    def __init__(self) -> None:
        self.server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.server.bind(("127.0.0.1", 0))
        self.server.setblocking(False)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.client.connect(self.server.getsockname())
        self.client.setblocking(False)
        self.asked = 0
        self.names = NameServer(self.server, self.listener, self._look)
        self.names.open()

    async def _look(self, _name: str, _kind: int) -> Lookup:
        self.asked += 1
        return Lookup(Answer(0))

    async def until(self, asked: int) -> None:
        async with asyncio.timeout(60):
            while self.asked < asked:
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.names.close()
        for sock in (self.server, self.listener, self.client):
            sock.close()


@pytest.fixture
async def field(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Field]:
    monkeypatch.setattr(nameserver, "QUERIES_PER_TURN", 4)
    monkeypatch.setattr(nameserver, "TURN_S", 3600.0)
    made = Field()
    yield made
    made.close()


async def test_what_is_asked_beyond_a_turns_share_waits_for_the_next(field: Field) -> None:
    for _ in range(7):
        field.client.send(QUERY)
    await field.until(4)
    await asyncio.sleep(0.05)
    assert field.asked == 4
    field.names._turn()
    await field.until(7)
    field.client.send(QUERY)
    await field.until(8)


async def test_streams_share_what_a_turn_has(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nameserver, "TURN_S", 0.001)
    reader, writer = await asyncio.open_connection(*field.listener.getsockname())
    framed = len(QUERY).to_bytes(2, "big") + QUERY
    writer.write(framed * 6)
    await field.until(6)
    size = int.from_bytes(await reader.readexactly(2), "big")
    assert dns.message.from_wire(await reader.readexactly(size)).rcode() == dns.rcode.NOERROR
    writer.close()
