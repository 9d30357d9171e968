"""Whoever connects to a port of a sandbox, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from services.edge.drivers.base import Stream


class Caller:
    """A ``PortIO`` that keeps what it gets and sends what it is told to."""

    def __init__(self, *chunks: bytes | None) -> None:
        self.there, self.over = asyncio.Event(), asyncio.Event()
        self.got = bytearray()
        self.sent = 0
        self.slow = asyncio.Event()
        self.slow.set()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.send(*chunks)

    def send(self, *chunks: bytes | None) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)

    async def connected(self) -> None:
        self.there.set()

    async def output(self, _stream: Stream, data: bytes) -> None:
        await self.slow.wait()
        self.got += data

    async def output_ended(self) -> None:
        self.over.set()

    async def input(self) -> AsyncIterator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
            self.sent += len(chunk)
