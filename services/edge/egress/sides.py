"""The two ends of a connection that the gate reads: plain bytes, or TLS.

Owns: reading, writing and ending either, over a socket from which some bytes were read
already. Does not own: what is said. TLS runs over the loop's own sockets and not over
its transports, because a hello that was read to learn its name cannot be given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Protocol

PIECE_BYTES = 64 * 1024


@dataclass(slots=True)
class Traffic:
    """Bytes that a sandbox ``sent`` and ``received`` by its way out."""

    sent: int = 0
    received: int = 0


class Side(Protocol):
    """One end."""

    async def read(self) -> bytes:
        """Some bytes, none at the end. Raises ``OSError``."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends all. One writer at a time."""
        ...

    async def end(self) -> None:
        """Sends no more; the other end may still."""
        ...


class Plain:
    """Bytes as they are; ``first`` were read before. ``traffic`` counts what is read as sent
    by the sandbox, what is written as received."""

    def __init__(
        self, sock: socket.socket, first: bytes = b"", traffic: Traffic | None = None
    ) -> None:
        self._sock, self._first, self._traffic = sock, first, traffic or Traffic()
        self._loop = asyncio.get_running_loop()

    async def read(self) -> bytes:
        if self._first:
            data, self._first = self._first, b""
        else:
            data = await self._loop.sock_recv(self._sock, PIECE_BYTES)
        self._traffic.sent += len(data)
        return data

    async def write(self, data: bytes) -> None:
        self._traffic.received += len(data)
        await self._loop.sock_sendall(self._sock, data)

    async def end(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)


class Tls:
    """TLS over ``under``. :meth:`shake` comes first. What TLS refuses is an
    ``ssl.SSLError``, which is an ``OSError``."""

    def __init__(
        self, under: Plain, context: ssl.SSLContext, *, server: bool = False,
        host: str | None = None,
    ) -> None:  # fmt: skip
        self._under = under
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server, server_hostname=host
        )
        self._sending = asyncio.Lock()

    async def shake(self) -> None:
        """The handshake, with the other end's certificate verified where it is a server's."""
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    await self._flush()
                    await self._fill()
        finally:
            with contextlib.suppress(OSError):
                await self._flush()  # an alert says why

    async def read(self) -> bytes:
        while True:
            try:
                return self._tls.read(PIECE_BYTES)
            except ssl.SSLWantReadError:
                await self._flush()
                await self._fill()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return b""

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), PIECE_BYTES):
            self._tls.write(data[start : start + PIECE_BYTES])
            await self._flush()

    async def end(self) -> None:
        with contextlib.suppress(OSError):
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.unwrap()  # our close is written; theirs is not waited for
            await self._flush()
        await self._under.end()

    async def _fill(self) -> None:
        data = await self._under.read()
        if data:
            self._incoming.write(data)
        else:
            self._incoming.write_eof()

    async def _flush(self) -> None:
        async with self._sending:
            if data := self._outgoing.read():
                await self._under.write(data)
