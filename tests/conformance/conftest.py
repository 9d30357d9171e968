"""Every conformance test runs once per driver, on a driver of its own module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.edge.drivers.base import Driver, Handle
from tests.conformance.harness import DRIVERS, LACKS, Harness, new_uid


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=sorted(DRIVERS))
async def harness(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Harness]:
    folder = tmp_path_factory.mktemp(request.param)
    async with DRIVERS[request.param](folder) as made:
        yield made


@pytest.fixture(autouse=True)
def within_its_means(request: pytest.FixtureRequest, harness: Harness) -> None:
    reason = LACKS.get(harness.driver.name, {}).get(request.function.__name__)
    if reason:
        pytest.skip(f"{harness.driver.name}: {reason}")


@pytest.fixture
def driver(harness: Harness) -> Driver:
    return harness.driver


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(harness: Harness) -> AsyncIterator[Handle]:
    """A running sandbox, gone after the test."""
    handle = await harness.driver.start(harness.spec(uid=new_uid()))
    yield handle
    await harness.driver.stop(handle)
