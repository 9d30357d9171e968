"""Bytes between a sandbox and what it reached: all of them, counted."""

from __future__ import annotations

import asyncio
import socket

from services.edge.egress import flows
from services.edge.egress.sides import Traffic

WITHIN_S = 60.0


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    for sock in (one, other):
        sock.setblocking(False)
    return one, other


async def test_what_is_carried_is_counted_by_direction() -> None:
    """Also what was read before, and what comes after one direction has ended."""
    loop = asyncio.get_running_loop()
    (mine, inner), (far, outer), traffic = pair(), pair(), Traffic()
    with mine, far:
        carried = asyncio.ensure_future(flows.splice(inner, outer, b"first", traffic))
        async with asyncio.timeout(WITHIN_S):
            await loop.sock_sendall(mine, b" and more")
            mine.shutdown(socket.SHUT_WR)
            sent = b""
            while data := await loop.sock_recv(far, 1024):
                sent += data
            await loop.sock_sendall(far, b"answer")
            far.shutdown(socket.SHUT_WR)
            received = b""
            while data := await loop.sock_recv(mine, 1024):
                received += data
            await carried
    assert (sent, received) == (b"first and more", b"answer")
    assert traffic == Traffic(sent=14, received=6)
