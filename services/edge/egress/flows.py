"""Bytes between a sandbox and what it reached.

Owns: both directions of a connection with their back-pressure and half-closes, resets.
Does not own: whether it is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from services.edge.egress.injecting import Injector
from services.edge.egress.sides import Traffic

PIECE_BYTES = 256 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER, 0 s: what is closed is reset


def reset(sock: socket.socket) -> None:
    """Closes a connection so that the other end knows it broke."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):
        sock.close()


async def relay(
    inner: socket.socket, outer: socket.socket, injector: Injector, first: bytes, *, name: str,
    port: int, traffic: Traffic,
) -> None:  # fmt: skip
    """Carries requests to ``name`` with its secrets put in; the rest as in :func:`splice`."""
    _tune(inner, outer)
    whole = False
    try:
        await injector.relay(inner, outer, first, name=name, port=port, traffic=traffic)
        whole = True
    finally:
        for sock in (inner, outer):
            sock.close() if whole else reset(sock)


def _tune(*socks: socket.socket) -> None:
    for sock in socks:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def splice(
    inner: socket.socket, outer: socket.socket, first: bytes, traffic: Traffic
) -> None:
    """Carries bytes until both directions have ended; ``first`` was read from ``inner``
    already. ``traffic`` counts what is passed on. A connection that breaks breaks the other.
    Both are closed at the end, reset where it was cancelled."""
    loop = asyncio.get_running_loop()
    _tune(inner, outer)

    async def out() -> None:
        data = first or await loop.sock_recv(inner, PIECE_BYTES)
        while data:
            traffic.sent += len(data)
            await loop.sock_sendall(outer, data)
            data = await loop.sock_recv(inner, PIECE_BYTES)
        end(outer)

    async def back() -> None:
        while data := await loop.sock_recv(outer, PIECE_BYTES):
            traffic.received += len(data)
            await loop.sock_sendall(inner, data)
        end(inner)

    def end(target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    whole = False
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(out())
            group.create_task(back())
        whole = True
    except* OSError:
        pass
    finally:
        for sock in (inner, outer):
            sock.close() if whole else reset(sock)
