"""Each service and each store is killed and restarted under load: nothing is lost,
nothing doubled, nothing leaked."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from libdsec import DSecClient, DSecRunArgs
from libdsec.errors import DSecError, OutcomeUnknown
from tests.e2e.conftest import alive, open_client, until, used

pytestmark = pytest.mark.slow

FAKE = DSecRunArgs(backend="fake", cpu_cores_limit=0.1, memory_limit_mb=16)
BATCH, BATCHES_AFTER = 10, 4
CREATE_S = 60.0


class Load:
    """Creates batches and runs one command in each sandbox, until told to finish:
    then a few batches more, so that work goes on after the fault."""

    def __init__(self, client: DSecClient) -> None:
        self.client = client
        self.created: list[object] = []
        self.errors: list[DSecError] = []
        self.requested = 0
        self.unknown = 0
        self._finish = asyncio.Event()

    def finish(self) -> None:
        self._finish.set()

    async def run(self) -> None:
        more = BATCHES_AFTER
        while more:
            more -= self._finish.is_set()
            self.requested += BATCH
            results = await self.client.create_many(FAKE, n=BATCH, timeout=CREATE_S)
            for result in results:
                if isinstance(result, DSecError):
                    self.errors.append(result)
                else:
                    self.created.append(result)
            await asyncio.gather(*(self._use(s) for s in results if not isinstance(s, DSecError)))

    async def _use(self, sandbox: object) -> None:
        try:
            result = await sandbox.exec("echo", "once", timeout=120)
        except OutcomeUnknown:
            self.unknown += 1
        else:
            assert result.stdout == b"once\n"


async def _audit_load(client: DSecClient, load: Load) -> None:
    uids = Counter(s.id for s in load.created)
    assert not load.errors, load.errors[:3]
    assert not load.unknown, "nobody but an edge forgets how a command ended"
    assert len(uids) == load.requested and set(uids.values()) == {1}
    listed = {s.id for s in await alive(client)}
    assert set(uids) <= listed, "lost"
    assert listed <= set(uids), "doubled"
    await client.stop_many(load.created)

    async def all_over() -> bool:
        return not await alive(client)

    await until(all_over, what="all over")

    async def nothing_charged() -> bool:
        return await used(client, client.project) == 0

    await until(nothing_charged, what="quota back to zero")

    async def nodes_empty() -> bool:
        nodes = await client.nodes.list()
        return all(n.committed.sandboxes == 0 for n in nodes if n.state == "ready")

    await until(nodes_empty, what="nodes hold nothing")


@pytest.mark.parametrize("service", ["auth", "scheduler", "imagesvc", "audit", "burst"])
async def test_a_service_killed_under_load_loses_nothing(fake_system, service: str) -> None:
    async with open_client(fake_system) as client:
        load = Load(client)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.5)
        await fake_system.kill(service)
        await asyncio.sleep(1.0)
        await fake_system.restart(service)
        load.finish()
        async with asyncio.timeout(180):
            await running
        await _audit_load(client, load)


@pytest.mark.parametrize("store", ["nats", "postgres", "valkey"])
async def test_a_store_killed_under_load_loses_nothing(fake_system, store: str) -> None:
    async with open_client(fake_system) as client:
        load = Load(client)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.5)
        await fake_system.restart_infra(store, kill=True)
        load.finish()
        async with asyncio.timeout(180):
            await running
        await _audit_load(client, load)


async def test_an_edge_killed_under_load_keeps_its_sandboxes(fake_system) -> None:
    async with open_client(fake_system) as client:
        before = list(await client.create_many(FAKE, n=10, timeout=CREATE_S))
        load = Load(client)
        running = asyncio.create_task(load.run())
        await asyncio.sleep(0.5)
        edge = next(name for name in fake_system.services if name.startswith("edge"))
        await fake_system.kill(edge)
        await asyncio.sleep(0.5)
        await fake_system.restart(edge)
        load.finish()
        async with asyncio.timeout(180):
            await running
        assert load.unknown <= BATCH, "a fake's commands end with their edge: one batch's ran"
        load.created += before
        for sandbox in before:
            assert (await sandbox.exec("echo", "alive")).stdout == b"alive\n"
        await client.stop_many(load.created)

        async def all_over() -> bool:
            return not await alive(client)

        await until(all_over, what="all over")
