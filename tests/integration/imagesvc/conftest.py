"""Stores and importers for tests that need the kernel's EROFS and overlay (root)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest

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


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    infra = Infra(tmp_path / "infra")
    ends = await infra.start()
    client = await nats.connect(ends.nats_url, user="auth", password=ends.nats_users["auth"])
    try:
        dsns = await prepare(ends.pg_dsn_admin, {"imagesvc": "secret"})
        await topology.declare(client.jetstream())
        folder = tmp_path / "work"
        folder.mkdir()
        yield Stack(ends, dsns["imagesvc"], client, folder)
    finally:
        await client.close()
        await infra.stop()


@pytest.fixture
async def app(stack: Stack) -> AsyncIterator[App]:
    made = App(stack.settings())
    await made.start()
    yield made
    await made.close()
