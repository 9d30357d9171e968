"""Reading a process's streams, with an operation that is told what to bring."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from typing import Any

import pytest

from libdsec import process
from libdsec._flow import Stood
from libdsec._wire import ExecReply
from libdsec.errors import DeadlineExceeded, ExpectTimeout
from libdsec.ports import Connection
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
    running = Process(operation, command="x", stdin=False)  # type: ignore[arg-type]
    reading = asyncio.create_task(running.stdout.__anext__())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    operation.free.set()
    assert await running.stdout.__anext__() == b"one"
    assert await running.stdout.__anext__() == b"two"
    assert operation.counted == 6


async def test_a_cancelled_read_of_a_connection_loses_nothing() -> None:
    operation: Any = Brings(b"one", b"two")
    operation.output_ended = False
    connection = Connection(operation, 80, core=None)  # type: ignore[arg-type]
    reading = asyncio.create_task(connection.read(2))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    operation.free.set()
    assert [await connection.read() for _ in range(2)] == [b"one", b"two"]
    assert operation.counted == 6


@pytest.mark.parametrize("plain", [True, False])
async def test_a_result_that_came_while_this_process_stood_still_is_taken(
    monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """As where a trainer's loop is busy with something else for longer than the command's
    limit and the margin: nobody says that the result stayed away."""
    monkeypatch.setattr(process, "MARGIN_S", 0.2)
    monkeypatch.setattr(process, "STOOD_S", 0.1)
    operation: Any = Brings()
    operation.stood = Stood()
    operation.free.set()

    async def final() -> ExecReply:
        return ExecReply(op_id="op", exit_code=7)

    async def arrives() -> None:
        for _ in range(1 if plain else 20):  # turns of the loop until it is read
            await asyncio.sleep(0)
        operation.done = True
        operation.news.set()

    operation.final, operation.abandon = final, lambda: None
    waiting = asyncio.create_task(process.collect(operation, timeout_s=0.1))
    await asyncio.sleep(0)
    time.sleep(0.8)  # noqa: ASYNC251 - it stands still
    arriving = asyncio.create_task(arrives())
    assert (await asyncio.wait_for(waiting, 60)).exit_code == 7
    await arriving


async def test_a_look_that_comes_late_shortens_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sandbox is paused, so that the clocks are looked at now and then."""
    now, slept = 1000.0, asyncio.timeout
    operation: Any = Brings()
    operation.stood = Stood()
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    limit = process._Limit(operation, 3600.0)
    operation.stood.told(b"0 p", now)

    def late(_seconds: float) -> asyncio.Timeout:
        nonlocal now
        now += 20.0
        return slept(0)

    monkeypatch.setattr(process.asyncio, "timeout", late)
    await limit.wait()
    operation.stood.told(b"20", now)
    assert limit._wait_s() == 3600.0 + process.MARGIN_S


async def test_a_result_that_stays_away_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MARGIN_S", 0.1)
    operation: Any = Brings()
    operation.stood = Stood()
    operation.abandon = lambda: None
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(process.collect(operation, timeout_s=0.1), 60)


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
