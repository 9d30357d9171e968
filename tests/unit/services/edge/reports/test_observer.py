"""What is published again after the process died between storing and its journal."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from schemas.base import decode
from schemas.sandbox import EdgeObservations, Observation
from services.edge.journal.journal import Journal
from services.edge.link import Link
from services.edge.reports.observer import Observer
from shared import ids
from shared.bus import Outgoing

HANG_S = 60.0


class Stream:
    """Stores what it has not under the same id."""

    def __init__(self) -> None:
        self.kept: dict[str | None, bytes] = {}

    async def store(self, messages: Sequence[Outgoing]) -> None:
        for message in messages:
            self.kept.setdefault(message.msg_id, message.data)

    def uids(self) -> list[str]:
        batches = [decode(data, EdgeObservations) for data in self.kept.values()]
        return [o.uid for batch in batches for o in batch.observations]


def observer(folder: Path, epoch: str, stream: Stream) -> tuple[Observer, Journal]:
    journal = Journal(folder / "journal")
    link = cast(Link, SimpleNamespace(bus=stream))
    observed = Observer(node="n", epoch=epoch, link=link, journal=journal)
    journal.start()
    return observed, journal


def seen(uid: str) -> Observation:
    return Observation(uid=uid, generation=1, observed="running", at=1.0)


async def test_what_was_stored_before_a_kill_is_not_told_again_with_what_is_new(
    tmp_path: Path,
) -> None:
    stream = Stream()
    one, two, three = ids.new(), ids.new(), ids.new()
    before, journal = observer(tmp_path / "before", "a", stream)
    await before.emit([seen(one), seen(two)])
    shutil.copytree(tmp_path / "before", tmp_path / "after")  # as a kill leaves it
    await before.flush()
    await journal.close()

    after, journal = observer(tmp_path / "after", "b", stream)
    await after.emit([seen(three)])
    await after.flush()
    assert stream.uids() == [one, two, three]
    await journal.check()
    assert not journal.reader().execute("select * from outbox").fetchall()
    await journal.close()


async def told(stream: Stream, count: int) -> None:
    async with asyncio.timeout(HANG_S):
        while len(stream.uids()) < count:
            await asyncio.sleep(0.001)


async def test_what_starts_together_is_told_of_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.edge.reports.observer.STARTS_LINGER_S", HANG_S)
    stream, uids = Stream(), [ids.new() for _ in range(3)]
    observed, journal = observer(tmp_path, "a", stream)
    observed.start()
    with observed.expected():
        for uid in uids:
            with observed.expected():
                await observed.emit([seen(uid)])
    await told(stream, 3)
    assert len(stream.kept) == 1
    await observed.close()
    await journal.close()


async def test_what_is_observed_waits_not_long_for_others(tmp_path: Path) -> None:
    stream = Stream()
    observed, journal = observer(tmp_path, "a", stream)
    observed.start()
    with observed.expected():
        await observed.emit([seen(ids.new())])
        await told(stream, 1)
    await observed.close()
    await journal.close()
