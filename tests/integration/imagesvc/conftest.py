"""Stores and importers for tests that need the kernel's EROFS and overlay (root)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import nats
import pytest
import pytest_asyncio

from devstack import Infra
from services.imagesvc.app import App
from services.imagesvc.importer import Importer
from shared import topology
from shared.blobs.folder import FolderStore
from shared.migrate import prepare
from tests.integration.imagesvc.service import Stack


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def importer(store: FolderStore) -> Iterator[Importer]:
    made = Importer(store)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def infra(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Infra]:
    made = Infra(tmp_path_factory.mktemp("infra"))
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def stack(infra: Infra, tmp_path: Path) -> AsyncIterator[Stack]:
    async with fresh_stack(infra, tmp_path) as made:
        yield made


@asynccontextmanager
async def fresh_stack(infra: Infra, tmp_path: Path) -> AsyncIterator[Stack]:
    """An empty schema, no commands, a folder of its own."""
    ends = infra.endpoints
    client = await nats.connect(
        ends.nats_url, user="auth", password=ends.nats_users["auth"], connect_timeout=60
    )
    try:
        database = await asyncpg.connect(ends.pg_dsn_admin)
        await database.execute("drop schema if exists imagesvc cascade")
        await database.close()
        dsns = await prepare(ends.pg_dsn_admin, {"imagesvc": "secret"})
        await topology.declare(client.jetstream(timeout=60))
        await client.jetstream(timeout=60).purge_stream("DSEC_CMD")
        folder = tmp_path / "work"
        folder.mkdir()
        yield Stack(ends, dsns["imagesvc"], client, folder)
    finally:
        await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def app(stack: Stack) -> AsyncIterator[App]:
    made = App(stack.settings())
    await made.start()
    yield made
    await made.close()
