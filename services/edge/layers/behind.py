"""Chunks that are verified and not yet on this node's disk.

Owns: their order, how many bytes of them wait, when they are written. Does not own: what is
right (:mod:`.chunks`), room on the disk and files (:mod:`.cache`). Writing costs about as much
of a core as fetching, and nobody waits for it: what begins with the chunks goes first. What a
death loses is fetched again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from services.edge.layers.cache import Key, LayerCache
from shared.blobs.base import Content

AFTER_S = 0.5
"""From the first chunk that waits to its write: longer than a program takes to begin."""

Write = Callable[[Key, Content], Awaitable[bool]]


class Behind:
    """``write`` makes a chunk's file off the loop; ``bytes_max`` may wait, beside one fetch's."""

    def __init__(self, cache: LayerCache, write: Write, *, bytes_max: int) -> None:
        self._cache, self._write, self._bytes_max = cache, write, bytes_max
        self._waiting: dict[Key, Content] = {}
        self._bytes = 0
        self._hurry = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._less = asyncio.Event()

    def get(self, key: Key) -> Content | None:
        """A chunk that waits."""
        return self._waiting.get(key)

    async def put(self, key: Key, data: Content) -> None:
        """Leaves it to be written. Returns when no more than the bound waits."""
        if key not in self._waiting:
            self._waiting[key] = data
            self._bytes += len(data)
        self._begin()
        while self._bytes > self._bytes_max:
            self._begin()
            self._hurry.set()
            self._less.clear()
            await self._less.wait()

    def _begin(self) -> None:
        if self._writing is None:
            self._writing = asyncio.create_task(self._run(), name="chunks to disk")

    async def flush(self) -> None:
        """Returns when what waits now is written, or was refused."""
        if self._writing is not None:
            self._hurry.set()
            await asyncio.shield(self._writing)

    async def _run(self) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), AFTER_S)
        try:
            while self._waiting:
                key, data = next(iter(self._waiting.items()))
                try:
                    await self._one(key, data)
                finally:
                    del self._waiting[key]
                    self._bytes -= len(data)
                    self._less.set()
        finally:
            self._hurry.clear()
            self._writing = None

    async def _one(self, key: Key, data: Content) -> None:
        if not self._cache.make_room(len(data)):
            return  # a full disk slows reading down, it does not stop it
        if await self._write(key, data):
            self._cache.put(key, len(data))
