"""What comes faster than it is read, up to a bound.

Owns: that nobody takes a row with a hole for a whole one. Does not own: what comes.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from libdsec.errors import Unavailable

T = TypeVar("T")


class Bounded(Generic[T]):
    """At most ``most`` wait. What comes then, and all that comes after it, is dropped: whoever
    reads gets what was before it, then ``Unavailable``. ``what`` it is, in words."""

    def __init__(self, most: int, what: str) -> None:
        self._queue: asyncio.Queue[T] = asyncio.Queue(most)
        self._over = False
        self._text = f"more than {most} {what} wait: the reader is too slow"

    def put(self, item: T) -> None:
        """Takes one in, if there is room."""
        self._over = self._over or self._queue.full()
        if not self._over:
            self._queue.put_nowait(item)

    async def get(self) -> T:
        """The next one. Raises ``Unavailable`` where some were dropped before it."""
        if self._over and self._queue.empty():
            raise Unavailable(self._text)
        return await self._queue.get()
