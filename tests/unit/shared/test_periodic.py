"""Periodic work goes on whatever a call does, and ends when it is told."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared.errors import Unavailable
from shared.periodic import Periodic


async def test_errors_are_told_and_end_nothing(caplog: pytest.LogCaptureFixture) -> None:
    calls = asyncio.Queue[int]()
    count = 0

    async def work() -> None:
        nonlocal count
        count += 1
        calls.put_nowait(count)
        if count == 1:
            raise Unavailable("the database is away")
        if count == 2:
            raise ValueError("a bug")

    periodic = Periodic("looks", work, every_s=0.001)
    with caplog.at_level(logging.WARNING):
        periodic.start()
        async with asyncio.timeout(60):
            while await calls.get() < 4:
                pass
        await periodic.close()
    told = [(r.levelname, r.exc_info is not None) for r in caplog.records]
    assert told == [("WARNING", False), ("ERROR", True)]
    after = count
    await asyncio.sleep(0.02)
    assert count == after


async def test_the_first_call_may_wait_and_a_call_at_work_is_cancelled() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    patient = Periodic("later", work, every_s=60, at_once=False)
    patient.start()
    await asyncio.sleep(0)
    await patient.close()
    assert not begun.is_set()
    eager = Periodic("now", work, every_s=60)
    eager.start()
    await asyncio.wait_for(begun.wait(), 60)
    await eager.close()
    assert ended.is_set()
    await Periodic("never started", work, every_s=1).close()


async def test_a_cancellation_that_comes_out_as_an_error_ends_it_all_the_same() -> None:
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError as exc:
            raise Unavailable("database: InterfaceError") from exc

    periodic = Periodic("looks", work, every_s=3600)
    periodic.start()
    await begun.wait()
    await asyncio.wait_for(periodic.close(), 60)


async def test_a_call_that_is_asked_for_comes_before_its_time() -> None:
    calls, soon = asyncio.Queue[None](), asyncio.Event()

    async def work() -> None:
        calls.put_nowait(None)

    periodic = Periodic("looks", work, every_s=3600, soon=soon)
    periodic.start()
    async with asyncio.timeout(60):
        await calls.get()
        for _ in range(3):
            soon.set()
            await calls.get()
    await periodic.close()
    assert calls.empty()
