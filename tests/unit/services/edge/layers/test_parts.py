"""The layer service's parts that need no kernel: cache, open files, profiles, faults."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from services.edge.layers import fuse
from services.edge.layers.behind import Behind
from services.edge.layers.cache import META, Content, Key, LayerCache
from services.edge.layers.chunks import grouped
from services.edge.layers.faults import Faults
from services.edge.layers.opens import Opens
from services.edge.layers.profiles import Profiles
from services.edge.layers.settings import Settings
from services.edge.layers.watch import violation
from shared.errors import InvalidRequest

A, B = "aa" * 32, "bb" * 32


def cache(root: Path, *in_use: str, cap: int = 1000) -> LayerCache:
    return LayerCache(root, cap_bytes=cap, reserve_bytes=0, in_use=set(in_use).__contains__)


def add_layer(made: LayerCache, digest: str) -> None:
    made.folder(digest).mkdir()
    (made.folder(digest) / "meta.erofs").write_bytes(bytes(100))
    (made.folder(digest) / "manifest.json").write_bytes(b"{}")
    made.add_layer(digest)


def put(made: LayerCache, digest: str, index: int, size: int = 100) -> None:
    if made.make_room(size) and made.write((digest, index), bytes([index]) * size):
        made.put((digest, index), size)


def on_disk(root: Path) -> int:
    return sum(p.stat().st_size for p in root.rglob("*") if p.is_file())


def test_the_oldest_goes_first_and_a_read_makes_young(tmp_path: Path) -> None:
    """(T09)"""
    made = cache(tmp_path)
    add_layer(made, A)
    for index in range(8):
        put(made, A, index)
    made.touch(A)
    assert made.read((A, 0), 10, 5) == bytes(5)
    for index in range(8, 12):
        put(made, A, index)
    assert [i for i in range(12) if made.has((A, i))] == [0, 5, 6, 7, 8, 9, 10, 11]
    assert made.bytes == 902 == on_disk(tmp_path)


def test_a_layers_metadata_goes_after_its_chunks(tmp_path: Path) -> None:
    made = cache(tmp_path, cap=450)
    add_layer(made, A)
    put(made, A, 0)
    add_layer(made, B)
    put(made, B, 0)
    put(made, B, 1)
    assert made.has((A, META)) and not made.has((A, 0))
    put(made, B, 2)
    assert made.has((B, 0)) and not made.has((A, META)) and not made.folder(A).exists()


def test_what_is_in_use_goes_last_and_its_metadata_never(tmp_path: Path) -> None:
    """(T09)"""
    made = cache(tmp_path, A)
    for digest in (A, B):
        add_layer(made, digest)
    for index in range(3):
        put(made, A, index)
    for index in range(20):
        put(made, B, index)
    assert all(made.has((A, i)) for i in (META, 0, 1, 2))
    for index in range(3, 30):
        put(made, A, index)
    assert made.has((A, META)) and not made.has((B, META)) and not made.folder(B).exists()
    assert made.bytes <= 1000 and on_disk(tmp_path) == made.bytes


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_the_books_are_right_and_the_cap_holds(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    in_use: set[str] = set()
    made = LayerCache(tmp_path, cap_bytes=2000, reserve_bytes=0, in_use=in_use.__contains__)
    for _ in range(200):
        digest = chance.choice([A, B])
        step = chance.randrange(5)
        if not made.has((digest, META)):
            add_layer(made, digest)
        elif step == 0:
            in_use ^= {digest}
        elif step == 1:
            made.read((digest, chance.randrange(20)), 0, 10)
        elif step == 2:
            made.touch(digest)
        else:
            put(made, digest, chance.randrange(20), chance.randrange(1, 500))
        assert made.bytes <= 2000 and on_disk(tmp_path) == made.bytes
    assert cache(tmp_path, cap=2000).bytes == made.bytes


def test_what_was_left_is_used_only_after_it_was_checked(tmp_path: Path) -> None:
    made = cache(tmp_path)
    add_layer(made, A)
    put(made, A, 1)
    (tmp_path / "tmpwork").mkdir()
    again = cache(tmp_path)
    assert again.layers() == [A] and again.has((A, 1)) and not (tmp_path / "tmpwork").exists()
    assert again.read((A, 1), 0, 1) is None
    assert again.content((A, 1)) == b"\1" * 100
    again.verified((A, 1))
    assert again.read((A, 1), 0, 1) == b"\1"


def test_open_files_are_known_to_the_next_process(tmp_path: Path) -> None:
    opens = Opens(tmp_path)
    for handle in (5, 6, 5):  # one request came twice
        opens.opened(handle, A)
    later = Opens(tmp_path)
    assert len(later) == 2 and later.is_open(A) and not later.is_open(B)
    assert later.closed(5) == A and later.closed(5) is None and later.is_open(A)
    assert later.closed(6) == A and not later.in_use(A) and os.listdir(tmp_path) == []
    later.hold(B, 60)
    assert later.in_use(B) and not later.is_open(B)
    later.hold(B, 0)
    assert not later.in_use(B)


def test_a_profile_is_the_first_readers_and_bounded(tmp_path: Path) -> None:
    profiles = Profiles(seconds=60, chunks_max=5)
    for unit in (7, 3, 3, 9):
        profiles.used(tmp_path, range(unit, unit + 1))
    assert profiles.of(tmp_path) == []
    profiles.finish(tmp_path)
    assert profiles.of(tmp_path) == [7, 3, 9]
    profiles.used(tmp_path, range(50))
    profiles.finish(tmp_path)
    assert profiles.of(tmp_path) == [7, 3, 9]
    (tmp_path / "profile").write_bytes(b"odd")
    assert profiles.of(tmp_path) == []


def test_the_same_fault_is_counted_and_told_under_one_id() -> None:
    faults = Faults()
    for _ in range(3):
        faults.tell("damaged", A, 4, "words")
    faults.tell("damaged", A, 5, "words")
    first, second = faults.after(0)
    assert (first.count, second.count) == (3, 1)
    assert faults.after(first.number) == [second]
    told = violation("n1", first)
    assert (told.rule, told.subject, told.mechanism) == ("layer_damaged", A, "sha256")


def test_answers_have_the_kernels_sizes() -> None:
    assert len(fuse.attributes(2, 10)) == 88 and len(fuse.entry(2, 10)) == 128
    assert len(fuse.attribute_answer(2, 10)) == 104 and len(fuse.open_answer(1)) == 16
    assert len(fuse.statfs_answer()) == 80 and len(fuse.init_answer(memoryview(bytes(64)))) == 64
    assert len(fuse.head(1)) == 16


@pytest.mark.parametrize("name", ["layers_unit_bytes", "layers_ahead_bytes"])
@pytest.mark.parametrize("value", [0, 1000, 262_144 + 1])
def test_what_is_fetched_is_whole_chunks(name: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Settings(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name


def test_what_is_fetched_ahead_is_neighbours_in_order_of_their_first() -> None:
    assert grouped([9, 5, 4, 8, 12, 13, 14, 15, 16], 4) == [[8, 9], [4, 5], [12, 13, 14, 15], [16]]
    assert grouped([0, 3, 2], 4) == [[0], [2, 3]]  # what nobody wants is not fetched between
    assert grouped([], 4) == []


async def test_what_waits_for_the_disk_is_there_and_bounded(tmp_path: Path) -> None:
    made = cache(tmp_path)
    add_layer(made, A)
    writable = asyncio.Event()

    async def write(key: Key, data: Content) -> bool:
        await writable.wait()
        return made.write(key, data)

    behind = Behind(made, write, bytes_max=250)
    for index in range(2):
        await behind.put((A, index), bytes(100))
    third = asyncio.create_task(behind.put((A, 2), bytes(100)))
    await asyncio.sleep(0)
    assert not third.done() and behind.get((A, 2)) == bytes(100)
    writable.set()
    await third
    await behind.flush()
    assert [made.has((A, index)) for index in range(3)] == [True] * 3
    assert behind.get((A, 0)) is None


async def test_what_the_disk_refuses_waits_no_longer(tmp_path: Path) -> None:
    made = cache(tmp_path, cap=150)
    add_layer(made, A)

    async def write(key: Key, data: Content) -> bool:
        return made.write(key, data)

    behind = Behind(made, write, bytes_max=50)
    await behind.put((A, 0), bytes(100))
    await behind.flush()
    assert behind.get((A, 0)) is None and not made.has((A, 0))
