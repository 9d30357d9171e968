"""A reader that is too slow for what comes gets no row with a hole in it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from libdsec import _ids, client
from libdsec._bounded import Bounded
from libdsec._wire import SandboxEvent, encode
from libdsec.client import DSecClient
from libdsec.errors import Unavailable


async def test_what_waits_comes_and_then_that_some_were_dropped() -> None:
    queue = Bounded[int](3, "numbers")
    for number in range(5):
        queue.put(number)
    assert await queue.get() == 0
    queue.put(5)  # there is room again, but it is not the next one
    assert [await queue.get(), await queue.get()] == [1, 2]
    for _ in range(2):
        with pytest.raises(Unavailable, match="more than 3 numbers wait"):
            await queue.get()


async def test_events_that_were_dropped_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "EVENTS_MAX", 2)
    takes: list[Any] = []

    async def end() -> None: ...

    async def listen(_subject: str, take: Any) -> Any:
        takes.append(take)
        return end

    link = SimpleNamespace(listen=listen)
    mine: Any = SimpleNamespace(_core=SimpleNamespace(link=link), project="p")
    events = DSecClient.events(mine)
    first = asyncio.ensure_future(anext(events))
    while not takes:
        await asyncio.sleep(0)
    uids = [_ids.new() for _ in range(5)]
    for uid in uids:
        event = SandboxEvent(uid=uid, project="p", state="running", generation=1, at=0.0)
        await takes[0](SimpleNamespace(headers=None, data=encode(event)))
    assert [(await first).uid, (await anext(events)).uid] == uids[:2]
    with pytest.raises(Unavailable, match="the reader is too slow"):
        await anext(events)
