"""What waits to be told: bounded in number, exact in count."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from schemas.audit import Violation, Violations
from schemas.base import decode
from services.edge.reports.violations import KINDS_PER_TURN, Repeats, Teller, Waiting
from shared.bus import Outgoing
from shared.errors import InvalidRequest

KINDS = st.tuples(
    st.sampled_from(["a", "b", "c"]), st.sampled_from(["bpf_net", "dns"]),
    st.integers(1, 1000), st.integers(0, 3),
)  # fmt: skip


def violation(uid: str, source: str, count: int, lost: int = 0) -> Violation:
    return Violation(
        id="x", at=1.0, node="n", uid=uid, project="p", source=source, verdict="denied",
        rule="r", mechanism="m", count=count, lost=lost,
    )  # fmt: skip


@given(st.lists(KINDS, max_size=60), st.integers(1, 8))
def test_no_count_is_lost_however_little_may_wait(
    seen: list[tuple[str, str, int, int]], most: int
) -> None:
    waiting = Waiting(most)
    for one in seen:
        waiting.add(violation(*one))
        assert len(waiting) <= most
    told: list[Violation] = []
    while waiting:
        batch = waiting.take(3)
        assert batch and len({(v.source, v.verdict) for v in batch}) == 1
        told += batch
    assert sum(v.count + v.lost for v in told) == sum(count + lost for *_, count, lost in seen)


def test_what_was_not_taken_is_told_first() -> None:
    waiting = Waiting()
    for count in (1, 2, 3):
        waiting.add(violation("a", "dns", count))
    batch = waiting.take(2)
    waiting.put_back(batch)
    assert [v.count for v in waiting.take(9)] == [1, 2, 3]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 3 * KINDS_PER_TURN), st.integers(1, 9)),
        max_size=300,
    )
)
def test_many_become_few_and_no_count_is_lost(seen: list[tuple[str, int, int]]) -> None:
    repeats = Repeats()
    told = []
    for uid, subject, count in seen:
        one = replace(violation(uid, "dns", count), subject=f"s{subject}")
        if (now := repeats.add(one)) is not None:
            told.append(now)
    told += repeats.turn()
    assert sum(v.count for v in told) == sum(count for *_, count in seen)
    for uid in "ab":
        assert len([v for v in told if v.uid == uid]) <= 2 * KINDS_PER_TURN + 1
    assert repeats.turn() == []


def test_the_first_of_a_kind_is_told_at_once_and_a_summary_says_how_many() -> None:
    repeats = Repeats()
    first = violation("a", "dns", 1)
    assert repeats.add(first) == first
    assert repeats.add(first) is None
    for n in range(10 * KINDS_PER_TURN):
        repeats.add(replace(first, subject=f"s{n}"))
    (summary,) = [v for v in repeats.turn() if v.targets]
    assert summary.targets > 8 * KINDS_PER_TURN and len(summary.samples) == 16


async def test_what_no_message_can_carry_keeps_nothing_else_from_being_told() -> None:
    """A sandbox names its files as it likes, and tries as many."""
    told: list[Violation] = []

    async def store(messages: list[Outgoing]) -> None:
        if len(messages[0].data) > 20_000:
            raise InvalidRequest("too large", field="payload")
        told.extend(decode(messages[0].data, Violations).violations)

    link: Any = SimpleNamespace(bus=SimpleNamespace(store=store))
    teller = Teller(node="n", epoch="e", link=link, now=lambda: 1.0)
    long = replace(violation("a", "observer", 3), samples=["x" * 4_000] * 16)
    for found in (violation("a", "observer", 1), long, *[violation("b", "observer", 2)] * 9):
        teller.tell(replace(found, subject="y" * 4_000))
    running = asyncio.create_task(teller.run())
    async with asyncio.timeout(60):
        while len(told) < 11:
            await asyncio.sleep(0.01)
    running.cancel()
    assert [v.count for v in told] == [1, 3, *[2] * 9]
    assert [len(v.samples) for v in told if v.count == 3] == [0]


async def test_an_error_that_nobody_thought_of_loses_its_own_violations_alone() -> None:
    told: list[Violation] = []

    async def store(messages: list[Outgoing]) -> None:
        violations = decode(messages[0].data, Violations).violations
        if violations[0].count == 1:
            raise RuntimeError("what is this?")
        told.extend(violations)

    link: Any = SimpleNamespace(bus=SimpleNamespace(store=store))
    teller = Teller(node="n", epoch="e", link=link, now=lambda: 1.0)
    running = asyncio.create_task(teller.run())
    for source, count in (("observer", 1), ("dns", 2)):
        teller.tell(violation("a", source, count))
    async with asyncio.timeout(60):
        while not told:
            await asyncio.sleep(0.01)
    running.cancel()
    assert [v.count for v in told] == [2]
