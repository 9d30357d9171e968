"""Who was silent, and who only was not heard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from services.scheduler import watcher as module
from services.scheduler.settings import Settings
from services.scheduler.watcher import LOOK_S, Watcher

SILENCE_S = 5.0
ANY = cast("Any", None)


class Time:
    """Goes on by itself while somebody sleeps; ``stood_s`` more in the next sleep."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.stood_s = 0.0
        self._turn = asyncio.sleep
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(module.asyncio, "sleep", self._sleep)

    async def _sleep(self, seconds: float) -> None:
        self.now += seconds + self.stood_s
        self.stood_s = 0.0
        await self._turn(0)

    async def until(self, when: float) -> None:
        while self.now < when:
            await self._turn(0)


class Rows:
    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        yield


async def test_a_scheduler_that_stood_still_itself_condemns_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was sent to it meanwhile is not read yet: it listens anew before it judges."""
    time, judged = Time(monkeypatch), list[float]()

    async def mark_lost(_: Any, _silence_s: float, _heard: Iterable[str]) -> list[str]:
        judged.append(time.now)
        return []

    monkeypatch.setattr(module.nodes, "mark_lost", mark_lost)
    settings = Settings(pg_dsn="", redis_url="", silence_s=SILENCE_S)

    async def more_room() -> None: ...

    watcher = Watcher(
        settings, cast("Any", Rows()), ANY, connected=lambda: True, more_room=more_room
    )
    watcher.start()
    await time.until(1000.0 + 2 * SILENCE_S)
    assert judged and min(judged) >= 1000.0 + SILENCE_S
    stood = time.now
    time.stood_s = 60.0
    await time.until(stood + 60.0 + 2 * SILENCE_S)
    await watcher.close()
    after = [at for at in judged if at > stood + LOOK_S]
    assert after and min(after) >= stood + 60.0 + SILENCE_S
