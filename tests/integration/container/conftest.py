"""One driver a module, one sandbox a test, on the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.edge.drivers.base import Handle
from services.edge.drivers.container import ContainerDriver
from tests.conformance.harness import new_uid
from tests.integration.container.harness import ContainerHarness, container_harness


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContainerHarness]:
    async with container_harness(tmp_path_factory.mktemp("container")) as made:
        yield made


@pytest.fixture
def driver(harness: ContainerHarness) -> ContainerDriver:
    return harness.driver


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(harness: ContainerHarness) -> AsyncIterator[Handle]:
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    yield handle
    await harness.driver.stop(handle)
