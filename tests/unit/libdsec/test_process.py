"""Reading a process's streams, with an operation that is told what to bring."""

from __future__ import annotations

import asyncio
import re
from collections import deque

import pytest

from libdsec.errors import ExpectTimeout
from libdsec.process import Process


class Brings:
    """An operation that has output, and whose link stands still on request."""

    def __init__(self, *parts: bytes) -> None:
        self.output = deque(("o", part) for part in parts)
        self.done = False
        self.free, self.news = asyncio.Event(), asyncio.Event()
        self.counted = 0

    async def taken(self, count: int) -> None:
        self.counted += count
        await self.free.wait()

    async def changed(self) -> None:
        self.news.clear()
        await self.news.wait()


async def test_a_cancelled_read_loses_nothing_and_counts_nothing_twice() -> None:
    operation = Brings(b"one", b"two")
    process = Process(operation, command="x", stdin=False)  # type: ignore[arg-type]
    reading = asyncio.create_task(process.stdout.__anext__())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    operation.free.set()
    assert await process.stdout.__anext__() == b"one"
    assert await process.stdout.__anext__() == b"two"
    assert operation.counted == 6


async def test_a_conversation_that_timed_out_finds_what_comes_later() -> None:
    operation = Brings(b"some")
    operation.free.set()
    talk = Process(operation, command="x", stdin=False).interact()  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(ExpectTimeout) as caught:
            await talk.expect("something", timeout=0.01)
        assert caught.value.before == b"some"
    operation.output.append(("o", b"thing more"))
    operation.news.set()
    found = await talk.expect(re.compile("so(.*)thing"), timeout=60)
    assert (found.data, found.match and found.match.group(1)) == (b"something", b"me")
    with pytest.raises(ExpectTimeout) as caught:
        await talk.expect("something", timeout=0)
    assert caught.value.before == b" more" and operation.counted == 14
