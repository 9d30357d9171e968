"""Branches of one fork share one copy, which goes when the last of them lies upon it."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from schemas.base import decode
from schemas.sandbox import ResolvedSpec, SandboxSpec, StartItem, Tightening
from services.edge.drivers.base import BackendReport
from services.edge.drivers.snapshotting import Captured
from services.edge.journal.records import Accepted
from services.edge.sandbox import repolicing
from services.edge.sandbox.actor import Sandbox
from services.edge.sandbox.ending import Fate
from services.edge.snapshots.branches import Captures
from shared import ids
from shared.errors import CapacityExhausted, NotFound

HANG_S = 60.0


class Driver:
    """Counts copies and what is given back; a copy takes until ``go`` is set."""

    name = "fake"

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.taken: list[str] = []
        self.released: list[str] = []
        self.cancelled = 0
        self.error: Exception | None = None

    async def probe(self) -> BackendReport:
        return BackendReport(True)

    async def capture(self, handle: object, id: str) -> Captured:
        self.taken.append(id)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        return Captured(id, ["/tree"], (id,))

    async def release(self, id: str) -> None:
        self.released.append(id)


def captures(driver: Driver, source: str) -> Captures:
    async def found() -> None: ...

    resolved = ResolvedSpec(spec=SandboxSpec(tighten=Tightening(network=["*"])))
    sandbox = SimpleNamespace(
        accepted=SimpleNamespace(resolved=resolved), driver=driver,
        backend="fake", fate=Fate(), ending=None, found=found,
        present=lambda: object(), pauses=SimpleNamespace(turn=asyncio.Lock()),
    )  # fmt: skip
    one = cast(Sandbox, sandbox)
    return Captures(lambda project, uid: one if (project, uid) == ("p", source) else None)


def branch(source: str, request: str) -> Accepted:
    item = StartItem(uid=ids.new(), project="p", generation=1, spec=0, expires_at=1e12)
    return Accepted(
        item=item, resolved=ResolvedSpec(spec=SandboxSpec(source=source), branch=request)
    )


async def start(shared: Captures, accepted: Accepted) -> Any:
    async with shared.below(accepted) as below:
        assert below.source.tighten == Tightening(network=["*"])
        return below.captures


async def test_branches_of_a_fork_share_one_copy() -> None:
    driver, source, request = Driver(), ids.new(), ids.new()
    shared = captures(driver, source)
    starts = [asyncio.create_task(start(shared, branch(source, request))) for _ in range(8)]
    await asyncio.sleep(0)
    driver.go.set()
    async with asyncio.timeout(HANG_S):
        assert await asyncio.gather(*starts) == [(request,)] * 8
        await shared.close()
    assert (driver.taken, driver.released) == ([request], [request])


async def test_a_copy_stays_while_one_branch_starts() -> None:
    driver, source, request = Driver(), ids.new(), ids.new()
    driver.go.set()
    shared = captures(driver, source)
    async with asyncio.timeout(HANG_S), shared.below(branch(source, request)):
        await start(shared, branch(source, request))
        await shared.close()
        assert driver.released == []
    await shared.close()
    assert driver.released == [request]


async def test_a_copy_that_nobody_waits_for_is_given_up() -> None:
    driver, source = Driver(), ids.new()
    shared = captures(driver, source)
    starts = [asyncio.create_task(start(shared, branch(source, ids.new()))) for _ in range(2)]
    await asyncio.sleep(0)
    for one in starts:
        one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one
    async with asyncio.timeout(HANG_S):
        await shared.close()
    assert driver.cancelled == len(driver.taken)
    assert driver.released == []


async def test_why_there_is_no_copy_is_told_to_every_branch() -> None:
    driver, source, request = Driver(), ids.new(), ids.new()
    driver.error = CapacityExhausted("the disk is full")
    driver.go.set()
    shared = captures(driver, source)
    starts = [start(shared, branch(source, request)) for _ in range(3)]
    found = await asyncio.gather(*starts, return_exceptions=True)
    assert [type(one) for one in found] == [CapacityExhausted] * 3
    with pytest.raises(NotFound):
        await start(shared, branch(ids.new(), request))
    await shared.close()
    assert driver.released == []


def test_what_a_branch_inherits_is_journalled_with_its_handle() -> None:
    """An edge that finds it by that knows the policy; of others nothing is written anew."""
    accepted = branch(ids.new(), ids.new())
    sandbox = cast(Sandbox, SimpleNamespace(uid=accepted.item.uid, accepted=accepted))
    source = SandboxSpec(network_rules={"*": False}, tighten=Tightening(network=["*"]))
    repolicing.inherit(sandbox, source)
    [(_, (written, uid))] = repolicing.inherited(sandbox)
    spec = decode(written, Accepted).resolved.spec
    assert uid == sandbox.uid and spec.source == accepted.resolved.spec.source
    assert (spec.network_rules, spec.tighten) == (source.network_rules, source.tighten)
    plain = replace(accepted, resolved=ResolvedSpec(spec=SandboxSpec()))
    assert repolicing.inherited(cast(Sandbox, SimpleNamespace(uid="u", accepted=plain))) == []
