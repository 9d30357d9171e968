"""A layer of a remote store is there while it is read, as often as it is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.imagesvc import layerroot
from services.imagesvc.layerroot import opened_layer

DIGEST = "a" * 64


@pytest.fixture
def mounts(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Metadata files that were mounted; what the store has is fetched at once."""
    seen: list[Path] = []

    async def fetch(_store: Any, _manifest: Any, folder: Path, _tick: Any) -> None:
        (folder / "meta").write_bytes(b"x")

    @contextlib.contextmanager
    def mounted(meta: Path, _data: Path | None) -> Iterator[int]:
        seen.append(meta)
        yield 7

    monkeypatch.setattr(layerroot, "_fetch", fetch)
    monkeypatch.setattr(layerroot, "mounted_layer", mounted)
    return seen


def test_a_layer_is_opened_again_after_and_beside_itself(
    tmp_path: Path, mounts: list[Path]
) -> None:
    store: Any = SimpleNamespace(manifest=lambda _digest: SimpleNamespace(data_bytes=0))
    for _ in range(2):
        with (
            opened_layer(store, DIGEST, tmp_path, tick=lambda _n: None),
            opened_layer(store, DIGEST, tmp_path, tick=lambda _n: None),
        ):
            assert len(list(tmp_path.iterdir())) == 2
    assert len(set(mounts)) == 4
    with (
        pytest.raises(KeyError),
        opened_layer(store, DIGEST, tmp_path, tick=lambda _n: None),
    ):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
