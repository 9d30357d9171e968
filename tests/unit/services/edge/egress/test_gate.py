"""A gate against rules that differ from what names have opened."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import pytest

from services.edge.egress import gate
from services.edge.egress.gate import Gate, Refused, _Flow
from services.edge.egress.grants import ADDRESSES_MAX, GRACE_S, HOLD_S
from services.edge.egress.kernelmaps import Kernel, PolicyMap
from services.edge.egress.libbpf import Map
from services.edge.egress.namespaces import Inside, Uplink
from services.edge.egress.resolver import Answer, Resolver
from services.edge.egress.sides import Traffic
from services.edge.policy.reach import Entry, Reach
from shared import policies
from shared.errors import CapacityExhausted
from shared.policies.network import Address

M, N = ipaddress.ip_address("203.0.113.4"), ipaddress.ip_address("203.0.113.5")


def of(rules: dict[str, bool]) -> Reach:
    return Reach(policies.read(None, rules).network, {})


class Rules:
    """A sandbox's part of the kernel's map."""

    def __init__(self, kernel: FakeKernel) -> None:
        self._kernel, self.held = kernel, dict[Any, Entry]()

    def fill(self, reach: Reach) -> None:
        self.put(reach.entries)

    def put(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if self._kernel.full:
                raise OSError(errno.ENOSPC, "full")
            self.held[entry.block] = entry

    def remove(self, entry: Entry) -> None:
        self.held.pop(entry.block, None)

    def close(self) -> None:
        self.held.clear()


class FakeKernel:
    def __init__(self) -> None:
        self.full = False
        self.inforce: Rules | None = None

    def policy(self, _rules: dict[str, int]) -> Rules:
        return Rules(self)

    def enforce(self, _cookie: int, policy: Rules) -> None:
        self.inforce = policy


class FakeUplink:
    async def is_own(self, _address: str, _family: int) -> bool:
        return False


class FakeResolver:
    def __init__(self) -> None:
        self.known: dict[str, tuple[Address, ...]] = {"m.example": (M,), "n.example": (N,)}
        self.asked: list[str] = []

    async def ask(self, name: str, _kind: int) -> Answer:
        self.asked.append(name)
        return Answer(0, self.known.get(name, ()), 60)


class Field:
    def __init__(self, rules: dict[str, bool], inside: Inside) -> None:
        self.kernel, self.resolver = FakeKernel(), FakeResolver()
        self.told: list[Refused] = []
        self.gate = Gate(
            inside, of(rules), kernel=cast(Kernel, self.kernel),
            uplink=cast(Uplink, FakeUplink()), resolver=cast(Resolver, self.resolver),
            tell=self.told.append, traffic=Traffic(),
        )  # fmt: skip

    async def look(self, name: str) -> Answer | None:
        return (await self.gate._look(name, 1)).answer

    async def judged(self, address: Address, port: int, name: str) -> Address | None:
        """Where a connection goes that says ``name``."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(b"GET / HTTP/1.1\r\nHost: " + name.encode() + b"\r\n\r\n")
            return (await self.gate._judged(ours, address, port, 1))[0]


@pytest.fixture
def inside() -> Iterator[Inside]:
    made = [socket.socketpair() for _ in range(2)]
    yield Inside(7, [], made[0][0], made[1][0])
    for pair in made:
        for sock in pair:
            sock.close()


async def test_another_hosts_name_leads_past_no_denial(inside: Inside) -> None:
    field = Field({"m.example": True, "n.example": True, f"{N}:443": False}, inside)
    for name in ("m.example", "n.example"):
        await field.look(name)
    assert await field.judged(M, 443, "m.example") == M
    assert await field.judged(M, 443, "n.example") is None
    assert [(t.source, t.rule, t.name) for t in field.told] == [
        ("sni", f"{N}:443", "n.example")
    ]
    assert await field.judged(M, 80, "n.example") == N


async def test_a_name_without_rules_is_not_asked_for(inside: Inside) -> None:
    field = Field({"m.example": True}, inside)
    await field.look("m.example")
    assert await field.judged(M, 443, "evil.example") is None
    assert field.resolver.asked == ["m.example"]


async def test_a_flow_is_judged_by_where_it_went(inside: Inside) -> None:
    field = Field({"m.example": True, "n.example": True}, inside)
    for name in ("m.example", "n.example"):
        await field.look(name)

    async def forever() -> None:
        await asyncio.Event().wait()

    flow = _Flow(asyncio.ensure_future(forever()), N, 443, "n.example")
    field.gate._flows.add(flow)
    assert field.gate.change(of({"m.example": True, "n.example": True})) == 0
    rules = {"m.example": True, "n.example": True, f"{N}:443": False}
    assert field.gate.change(of(rules)) == 1
    with pytest.raises(asyncio.CancelledError):
        await flow.task


async def test_rules_that_find_no_room_change_nothing(inside: Inside) -> None:
    field = Field({"m.example": True}, inside)
    field.gate.change(of({"m.example": True}))
    before = field.kernel.inforce
    field.kernel.full = True
    with pytest.raises(OSError, match="full"):
        field.gate.change(of({"n.example": True}))
    assert field.kernel.inforce is before and before is not None
    assert await field.look("n.example") is None
    field.kernel.full = False
    await field.look("m.example")
    assert ipaddress.ip_network(M) in before.held


async def test_addresses_beyond_what_is_kept_are_not_put_into_the_map(inside: Inside) -> None:
    field = Field({"*.a.example": True}, inside)
    many = [ipaddress.ip_address(0x50000000 + n) for n in range(ADDRESSES_MAX + 1)]
    field.resolver.known["x.a.example"] = tuple(many)
    field.gate.change(of({"*.a.example": True}))
    answer = await field.look("x.a.example")
    assert answer is not None and answer.addresses == tuple(many[:-1])
    assert field.kernel.inforce is not None
    assert ipaddress.ip_network(many[-1]) not in field.kernel.inforce.held


async def test_a_full_map_refuses_a_name_and_goes_on_closing(inside: Inside) -> None:
    field = Field({"m.example": True, "n.example": True, f"{M}:22": False}, inside)
    field.gate.change(of({"m.example": True, "n.example": True, f"{M}:22": False}))
    inforce = field.kernel.inforce
    assert inforce is not None
    own = inforce.held[ipaddress.ip_network(M)]
    await field.look("m.example")
    await field.look("n.example")
    field.kernel.full = True
    with pytest.raises(CapacityExhausted):
        await field.look("n.example")
    over = time.monotonic() + 3600 + HOLD_S + GRACE_S
    field.gate._expire(over)
    assert ipaddress.ip_network(N) not in inforce.held
    assert inforce.held[ipaddress.ip_network(M)] != own
    field.kernel.full = False
    field.gate._expire(over)
    assert inforce.held[ipaddress.ip_network(M)] == own


class FullTrie:
    """Takes nothing at its limit, not even another value: as the kernel's does."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def set(self, key: bytes, value: bytes) -> None:
        if len(self.held) >= 1:
            raise OSError(errno.ENOSPC, "full")
        self.held[key] = value

    def delete(self, key: bytes) -> None:
        self.held.pop(key, None)


def test_a_full_map_is_changed_where_it_is_the_sandboxs() -> None:
    trie = FullTrie()
    made = PolicyMap(cast(Map, trie), cast(Map, trie), 1, {})
    reach = of({})
    made.put([reach.opened(M, [(443, 443)])])
    before = dict(trie.held)
    made.put([reach.opened(M, [(80, 80)])])
    assert trie.held.keys() == before.keys() and trie.held != before
    with pytest.raises(OSError, match="full"):
        made.put([reach.opened(N, [(80, 80)])])


class Trie:
    """A map of the kernel's with room."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def set(self, key: bytes, value: bytes) -> None:
        self.held[key] = value

    def delete(self, key: bytes) -> None:
        self.held.pop(key, None)


def test_a_reach_lies_in_each_map_as_its_entries_do() -> None:
    reach = of({"10.1.0.0/16:80": True, "fd00::/8": False, "192.0.2.7": True})

    def rules(number: int, fill: bool, known: dict[str, int]) -> tuple[PolicyMap, Trie]:
        trie = Trie()
        made = PolicyMap(cast(Map, trie), cast(Map, trie), number, known)
        if fill:
            made.fill(reach)
        else:
            made.put(reach.entries)
        return made, trie

    for number in (1, 70_000):
        first, second = dict[str, int](), dict[str, int]()
        (one, filled), (_, put) = rules(number, True, first), rules(number, False, second)
        assert filled.held == put.held != {} and first == second
        one.close()
        assert not filled.held
    earlier = {"earlier": 1}  # a text keeps its number for as long as the sandbox lives
    _, filled = rules(3, True, earlier)
    _, put = rules(3, False, {"earlier": 1})
    assert filled.held == put.held and earlier["earlier"] == 1


async def test_a_connection_that_cannot_be_taken_is_not_the_last(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "ACCEPT_AGAIN_S", 0.001)
    field = Field({}, inside)
    loop, tries = asyncio.get_running_loop(), list[int]()
    listener = socket.socket()

    async def refused(_: socket.socket) -> None:
        tries.append(1)
        if len(tries) == 3:
            listener.close()
        raise OSError(errno.EMFILE, "no descriptors")

    monkeypatch.setattr(loop, "sock_accept", refused)
    await asyncio.wait_for(field.gate._accept(listener), 60)
    assert len(tries) == 3
