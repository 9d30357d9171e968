"""Output budgets: head and tail are kept, the middle is dropped and counted."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import cast

from services.edge.drivers.base import Stream

Emit = Callable[[Stream, bytes], Awaitable[None]]


class Budget:
    """One stream's ``limit`` in bytes: the first half goes out as it comes, the last
    half is held until the end."""

    def __init__(self, stream: str, limit: int, emit: Emit) -> None:
        self._stream = cast(Stream, stream)
        self._head = limit - limit // 2
        self._tail_limit = limit // 2
        self._tail = bytearray()
        self._emit = emit
        self.dropped = 0
        self.written_at = time.monotonic()

    async def write(self, data: bytes) -> None:
        """Takes output."""
        self.written_at = time.monotonic()
        head, rest = data[: self._head], data[self._head :]
        if head:
            self._head -= len(head)
            await self._emit(self._stream, head)
        if rest:
            self._tail += rest
            excess = len(self._tail) - self._tail_limit
            if excess > 0:
                self.dropped += excess
                del self._tail[:excess]

    async def close(self) -> None:
        """Emits the tail."""
        if self._tail:
            await self._emit(self._stream, bytes(self._tail))
            self._tail.clear()
