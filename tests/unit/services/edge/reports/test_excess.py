"""What became more since it was told, told once, whatever the bus does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.audit import Violation, Violations
from schemas.base import decode
from services.edge.drivers.counters import Counters
from services.edge.reports.excess import RARELY, Excess
from shared.bus import Outgoing
from shared.clock import FakeClock
from shared.errors import Unavailable


@dataclass
class Bus:
    """A bus that may be away."""

    stored: list[Outgoing] = field(default_factory=list)
    away: bool = False
    meanwhile: Callable[[], None] = lambda: None

    async def store(self, messages: Sequence[Outgoing]) -> None:
        self.meanwhile()
        if self.away:
            raise Unavailable("away")
        self.stored += messages


class Driver:
    """Counts as it is told to."""

    def __init__(self) -> None:
        self.now: dict[str, Counters] = {}
        self.asked: list[str] = []

    async def counters(self, handles: Sequence[Any]) -> list[Counters]:
        self.asked += [handle.uid for handle in handles]
        return [self.now.get(handle.uid, Counters()) for handle in handles]


class Node:
    """Excess over sandboxes that stand still."""

    def __init__(self) -> None:
        self.bus, self.driver, self.sandboxes = Bus(), Driver(), {}
        supervisor: Any = SimpleNamespace(sandboxes=self.sandboxes)
        link: Any = SimpleNamespace(bus=self.bus)
        self.excess = Excess(supervisor, node="n1", link=link, clock=FakeClock())

    def add(self, uid: str, *, epoch: int = 0, idle_s: float = 0.0):
        self.sandboxes[uid] = SimpleNamespace(
            uid=uid, project="p", epoch=epoch, state="running", driver=self.driver,
            handle=SimpleNamespace(uid=uid),
            activity=SimpleNamespace(idle_s=idle_s, dropped_bytes=0, noted=deque()),
        )  # fmt: skip
        return self.sandboxes[uid]

    async def told(self) -> list[Violation]:
        """What one more look told."""
        before = len(self.bus.stored)
        await self.excess.look()
        return [
            violation
            for message in self.bus.stored[before:]
            for violation in decode(message.data, Violations).violations
        ]


async def test_only_what_became_more_is_told() -> None:
    node = Node()
    box = node.add("u1")
    assert await node.told() == []
    node.driver.now["u1"] = Counters(pids_refused=7)
    (first,) = await node.told()
    assert (first.rule, first.count, first.uid, first.source) == (
        "pids_limit", 7, "u1", "resource",
    )  # fmt: skip
    assert await node.told() == []
    node.driver.now["u1"] = Counters(pids_refused=9, oom_kills=1)
    box.activity.dropped_bytes = 5_000
    told = await node.told()
    assert [(v.rule, v.count) for v in told] == [
        ("pids_limit", 2), ("memory_limit", 1), ("output_limit", 1),
    ]  # fmt: skip
    assert told[2].actor == {"dropped_bytes": 5_000}
    assert len({first.id, *(v.id for v in told)}) == 4


async def test_nothing_is_lost_while_the_bus_is_away() -> None:
    node = Node()
    node.add("u1")
    node.bus.away = True
    for refused in (3, 8):
        node.driver.now["u1"] = Counters(pids_refused=refused)
        with pytest.raises(Unavailable):
            await node.told()
    node.bus.away = False
    (told,) = await node.told()
    assert told.count == 8


async def test_a_sandbox_that_is_found_again_begins_with_what_it_has() -> None:
    node = Node()
    node.add("u1", epoch=1)
    node.driver.now["u1"] = Counters(pids_refused=50)
    assert await node.told() == []
    node.driver.now["u1"] = Counters(pids_refused=51)
    (told,) = await node.told()
    assert told.count == 1


async def test_idle_sandboxes_are_looked_at_rarely_and_gone_ones_forgotten() -> None:
    node = Node()
    for number in range(20):
        node.add(f"u{number}", idle_s=1_000.0)
    for _ in range(RARELY):
        await node.told()
    assert sorted(node.driver.asked) == sorted(node.sandboxes)
    node.sandboxes.clear()
    await node.told()
    assert node.excess._told == {}


async def test_a_full_disk_is_told_once() -> None:
    node = Node()
    node.add("u1")
    node.driver.now["u1"] = Counters(disk_bytes=10 << 20, disk_full=True)
    (told,) = await node.told()
    assert told.rule == "disk_limit"
    assert await node.told() == []
    node.driver.now["u1"] = Counters(disk_bytes=5 << 20)
    assert await node.told() == []


async def test_commands_worth_a_word_are_told_when_the_bus_takes_them() -> None:
    node = Node()
    box = node.add("u1")
    box.activity.noted.extend(["git log --all", "git reflog", "git log --all"])
    node.bus.away = True
    with pytest.raises(Unavailable):
        await node.told()
    node.bus.away = False
    told = await node.told()
    assert [(v.source, v.action, v.subject, v.count) for v in told] == [
        ("observer", "exec", "git log --all", 2), ("observer", "exec", "git reflog", 1),
    ]  # fmt: skip
    assert await node.told() == []


async def test_commands_that_come_while_others_are_told_are_told_next() -> None:
    node = Node()
    noted = node.add("u1").activity.noted = deque(["a", "b", "c"], maxlen=3)
    node.bus.meanwhile = lambda: noted.extend(["d", "e"])
    assert [v.subject for v in await node.told()] == ["a", "b", "c"]
    node.bus.meanwhile, node.bus.away = lambda: noted.append("f"), True
    with pytest.raises(Unavailable):
        await node.told()
    node.bus.meanwhile, node.bus.away = lambda: None, False
    assert [v.subject for v in await node.told()] == ["d", "e", "f"]
    assert await node.told() == []
