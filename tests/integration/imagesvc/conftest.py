"""Stores and importers for tests that need the kernel's EROFS and overlay (root)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.imagesvc.blobstore import FolderStore
from services.imagesvc.importer import Importer


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


@pytest.fixture
def importer(store: FolderStore) -> Iterator[Importer]:
    made = Importer(store)
    yield made
    made.close()
