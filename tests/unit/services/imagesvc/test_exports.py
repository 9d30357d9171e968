"""Exports whose outcome nobody asks for take nobody's place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from schemas.sandbox import ImageConfig
from services.imagesvc.exports import QUEUE_MAX, Environment, Exports
from services.imagesvc.names import ImageName
from shared.errors import CapacityExhausted, NotFound


class Store:
    """Has nothing."""

    def manifest(self, digest: str) -> Any:
        raise NotFound(f"no layer {digest}", field="digest")


def environment(number: int) -> Environment:
    return Environment("team", ImageName("x"), [f"{number:064x}"], ImageConfig())


def exports(folder: Path, store: Any = None) -> Exports:
    async def keep(holder: str, layers: Sequence[Any]) -> None: ...

    async def release(holder: str) -> None: ...

    store = store or Store()
    return Exports(store, folder, keep_s=60, keep=keep, release=release, total_bytes_max=20_000)


async def outcome(made: Exports, number: int) -> None:
    while (await made.get(environment(number))).export is None:
        await asyncio.sleep(0.01)


async def test_a_failed_export_is_told_and_may_be_asked_for_again(tmp_path: Path) -> None:
    made = exports(tmp_path)
    for _ in range(2):
        with pytest.raises(NotFound):
            await outcome(made, 1)
    await made.close()


async def test_what_nobody_asks_for_again_fills_no_queue(tmp_path: Path) -> None:
    made = exports(tmp_path)
    for number in range(3 * QUEUE_MAX):
        while True:
            try:
                await made.get(environment(number))
                break
            except CapacityExhausted:  # the others are still at it
                await asyncio.sleep(0.01)
            except NotFound:
                break
    await made.close()


async def test_facts_that_a_crash_cut_are_no_export(tmp_path: Path) -> None:
    """Its work begins anew, rather than failing for as long as the file is there."""
    made = exports(tmp_path)
    archive = made._path("team", environment(1).id)
    archive.write_bytes(b"archive")
    archive.with_suffix(".json").write_bytes(b'{"id": "x", "si')
    with pytest.raises(NotFound):
        await outcome(made, 1)
    await made.close()


@dataclass
class Large:
    """Has layers of a size."""

    data_bytes: int

    def manifest(self, digest: str) -> Any:
        return self


async def test_exports_are_bounded_together(tmp_path: Path) -> None:
    """(T09) Before one is made, and with what is there already."""
    with pytest.raises(CapacityExhausted):
        await outcome(exports(tmp_path, Large(20_001)), 1)
    (tmp_path / "other").write_bytes(bytes(15_000))
    with pytest.raises(CapacityExhausted):
        await outcome(exports(tmp_path, Large(5_001)), 1)


async def test_an_export_ends_where_it_grows_beyond_its_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(out: IO[bytes], *_: object, tick: Callable[[int], None], **__: object) -> None:
        for _ in range(100):
            out.write(bytes(1000))
            out.flush()
            tick(0)

    monkeypatch.setattr("services.imagesvc.exports.write_archive", write)
    with pytest.raises(CapacityExhausted):
        await outcome(exports(tmp_path, Large(1)), 1)
    assert list(tmp_path.iterdir()) == []
