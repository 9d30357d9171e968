"""A connection of its own: where there is no server, and where there comes another."""

from __future__ import annotations

import asyncio
import json

import pytest

from devstack.process import free_port
from libdsec._link import Link
from libdsec.config import Config
from libdsec.errors import Unavailable


async def test_who_finds_no_server_is_told_why() -> None:
    link = Link(Config(f"nats://127.0.0.1:{free_port()}", "team", "p", "key"), "c1")
    with pytest.raises(Unavailable, match=r"no server at nats://.* within 1 s \(.*failed"):
        await link.open(1.0)


class Expiring:
    """A server that ends its first connection for good once it has a subscription: nats-py
    makes no other by itself."""

    def __init__(self) -> None:
        self.lines: list[list[bytes]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines: list[bytes] = []
        self.lines.append(lines)
        info = {"server_id": "S", "version": "2.11.0", "max_payload": 1 << 20, "headers": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        while line := await reader.readline():
            lines.append(line.split()[0])
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
                if lines is self.lines[0] and b"SUB" in lines:
                    writer.write(b"-ERR 'User Authentication Expired'\r\n")
                    writer.close()
                    return
        writer.close()


async def test_what_is_not_listened_to_any_more_is_not_either_by_another_connection() -> None:
    heard = Expiring()
    server = await asyncio.start_server(heard.serve, "127.0.0.1", 0)
    url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    link = Link(Config(url, "team", "p", "key"), "c1")
    up = asyncio.Event()
    link.on_up = up.set

    async def take(_message: object) -> None: ...

    await link.open(60)
    ends = [await link.listen("dsec.evt.>", take) for _ in range(2)]
    async with asyncio.timeout(60):
        await up.wait()
        assert heard.lines[-1].count(b"SUB") == 2, "each goes on"
        await ends[0]()
        await link.flush(60)
        assert heard.lines[-1].count(b"UNSUB") == 1
        await ends[1]()
        await link.flush(60)
        assert heard.lines[-1].count(b"UNSUB") == 2
    await link.close()
    server.close()
