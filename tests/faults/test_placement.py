"""Faults of choosing nodes: bursts on stale views, and nodes that are oversold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from libdsec import CapacityExhausted, DSecClient, Sandbox
from services.local import LocalOptions, LocalSystem
from tests.e2e.conftest import UNMOVED, alive, open_client, until
from tests.faults.conftest import CREATE_S, fake_args

NODES, ROOM = 5, 44
BURST = 200
CHOICES = 4
"""Nodes that placement looks at for one sandbox, generously."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DSecClient]:
    """A client of a system with NODES fake nodes of ROOM sandboxes each."""
    options = LocalOptions(
        driver="fake", nodes=NODES, state_dir=tmp_path_factory.mktemp("fleet"),
        env={"DSEC_CAPACITY_SANDBOXES": str(ROOM), **UNMOVED},
    )  # fmt: skip
    async with LocalSystem(options) as system, open_client(system) as client:
        yield client


PATIENCE_S = 40.0
"""What finds no room waits so long for some."""


async def burst(
    client: DSecClient, count: int, *, timeout_s: float = CREATE_S
) -> list[Sandbox | BaseException]:
    """Creates one by one, all at once."""
    calls = (client.create(fake_args(), timeout=timeout_s) for _ in range(count))
    return await asyncio.gather(*calls, return_exceptions=True)


async def end_all(client: DSecClient) -> None:
    await client.stop_many(await alive(client))

    async def empty() -> bool:
        return not any(n.committed.sandboxes for n in await client.nodes.list())

    await until(empty, what="empty nodes")


@pytest_asyncio.fixture(loop_scope="session")
async def empty_fleet(fleet: DSecClient) -> DSecClient:
    """The fleet, with nothing on it and every node known."""

    async def all_chosen() -> bool:
        made = await burst(fleet, NODES * 4)
        assert all(isinstance(m, Sandbox) for m in made)
        return len({m.node for m in made if isinstance(m, Sandbox)}) == NODES

    await end_all(fleet)
    await until(all_chosen)
    await end_all(fleet)
    await asyncio.sleep(1.2)  # a beat of every node

    async def told() -> bool:
        return not any(n.used.sandboxes for n in await fleet.nodes.list())

    await until(told, what="every node has told of its emptiness")
    return fleet


async def test_a_burst_between_two_heartbeats_is_spread(empty_fleet: DSecClient) -> None:
    """(B10)"""
    made = await burst(empty_fleet, BURST)
    assert not [m for m in made if not isinstance(m, Sandbox)]
    counts = Counter(m.node for m in made if isinstance(m, Sandbox))
    assert len(counts) == NODES
    assert max(counts.values()) - min(counts.values()) <= 0.1 * BURST / NODES + CHOICES


async def test_nodes_take_exactly_what_they_have_room_for(empty_fleet: DSecClient) -> None:
    """(B11) Asked for at once, one more than fits is refused, not oversold."""
    fleet = empty_fleet
    over = 80
    results = await burst(fleet, NODES * ROOM + over, timeout_s=PATIENCE_S)
    made = [r for r in results if isinstance(r, Sandbox)]
    refused = [r for r in results if not isinstance(r, Sandbox)]
    assert Counter(m.node for m in made) == {n.id: ROOM for n in await fleet.nodes.list()}
    assert len(refused) == over
    assert all(isinstance(r, CapacityExhausted) and r.retryable for r in refused), refused[:3]
    assert all(n.committed.sandboxes <= ROOM for n in await fleet.nodes.list())
    await made[0].stop()
    again = await fleet.create(fake_args(), timeout=CREATE_S)
    assert again.node == made[0].node, "room is given back"
