"""One cluster a test: real nats-server, real edge process, fake sandboxes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.edge.cluster import Cluster, cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/integration/edge/" in str(item.path):
            item.add_marker(pytest.mark.integration)


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as made:
        yield made
