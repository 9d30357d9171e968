"""Denials that are counted: each told once, what is remembered bounded by the kernel."""

from __future__ import annotations

import asyncio
import ipaddress
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

import pytest

from schemas.audit import Violation
from services.edge.egress import manager
from services.edge.egress.gate import Gate
from services.edge.egress.kernelmaps import _DENIAL, Event, Kernel, address_bytes, denial

COOKIE = 7


def key(number: int, port: int = 443) -> bytes:
    address = address_bytes(ipaddress.IPv4Address(0xCB007100 + number))
    return _DENIAL.pack(COOKIE, address, port, 6, 1, 0)


class FakeKernel:
    def __init__(self) -> None:
        self.table: dict[bytes, int] = {}
        self.total = 0
        self.readers: set[int] = set()

    def deny(self, what: bytes, times: int = 1) -> None:
        self.table[what] = self.table.get(what, 0) + times
        self.total += times

    def denied(self, _netns: int) -> int:
        return self.total

    def count(self, what: bytes) -> int:
        return self.table.get(what, 0)

    def denials(self, netns: Collection[int]) -> dict[int, dict[bytes, int]]:
        self.readers.add(threading.get_ident())
        return {one: dict(self.table) for one in netns}


class FakeGate:
    cookie = COOKIE

    def rule(self, _number: int) -> str:
        return "default"


class Field:
    def __init__(self) -> None:
        self.told: list[Violation] = []
        self.kernel = FakeKernel()
        self.egress = manager.Egress(
            program=Path("none"), uplink=None, servers=[], services={}, tell=self.told.append,
            authority=Path("none"),
        )
        self.egress._kernel = cast(Kernel, self.kernel)
        self.held = manager._Held("u", "p", cast(Gate, FakeGate()), "")
        self.egress._held["u"] = self.egress._by_cookie[COOKIE] = self.held

    def event(self, what: bytes) -> None:
        self.egress._event(Event(0.0, 1, 0, "nc", COOKIE, what))


@pytest.fixture
def field() -> Field:
    return Field()


def test_what_the_kernel_counted_is_told_once(field: Field) -> None:
    field.kernel.deny(key(1), 3)
    field.event(key(1))
    for _ in range(2):
        field.egress._count(field.held)
    assert [v.count for v in field.told] == [1, 2]
    assert field.told[1].subject == "tcp:203.0.113.1:443"


def test_what_the_kernel_forgot_is_not_remembered(field: Field) -> None:
    for n in range(100):
        field.kernel.table.clear()
        field.kernel.deny(key(n))
        field.egress._count(field.held)
    assert list(field.held.told) == [key(99)]
    assert sum(v.count for v in field.told) == 100


def test_denials_that_were_pushed_out_are_told_as_lost(field: Field) -> None:
    field.kernel.deny(key(1))
    field.kernel.total += 9
    field.egress._count(field.held)
    assert [(v.count, v.lost) for v in field.told] == [(1, 0), (0, 9)]


def test_an_event_while_the_table_is_read_is_not_told_again(field: Field) -> None:
    field.kernel.deny(key(1))
    totals = field.egress._behind([field.held])
    read = manager._read(cast(Kernel, field.kernel), {COOKIE: {}})
    field.event(key(1))
    field.kernel.deny(key(2))
    field.event(key(2))
    field.egress._take(totals, read)
    field.egress._count(field.held)
    assert [(v.subject, v.count, v.lost) for v in field.told] == [
        ("tcp:203.0.113.1:443", 1, 0), ("tcp:203.0.113.2:443", 1, 0),
    ]  # fmt: skip


async def test_the_table_is_read_off_the_loop(
    field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "COUNT_S", 0.0)
    for n in range(manager.TOLD_SINGLY_MAX + 1):
        field.kernel.deny(key(n))
    counting = asyncio.ensure_future(field.egress._count_on())
    while not field.told:
        await asyncio.sleep(0.001)
    counting.cancel()
    assert threading.get_ident() not in field.kernel.readers
    assert [v.targets for v in field.told] == [manager.TOLD_SINGLY_MAX + 1]


def test_a_key_says_its_destination() -> None:
    found: Any = denial(key(1, 80))
    assert (found.address, found.port, found.protocol) == ("203.0.113.1", 80, "tcp")
