"""The layer service over S3: what is read is right, on demand, and survives."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from services.edge.layers.catalog import HEADS
from services.edge.layers.profiles import NAME as PROFILE
from shared.blobs.layout import META_NAME
from shared.errors import Internal, NotFound
from tests.integration.layers.conftest import WAIT_S, Node, alive, eventually, forget_pages

pytestmark = pytest.mark.integration

MIB = 1 << 20
DEADLINE_S = 1.5
ONE_LAYER = HEADS + 2
"""Questions about one layer at once: of its metadata, its digests and its manifest."""


def files(count: int, size: int = MIB) -> dict[str, bytes]:
    return {f"f{number:02}": os.urandom(size) for number in range(count)}


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def reads(path: Path) -> bytes | int:
    """A file's content, or the number of the error."""
    try:
        return path.read_bytes()
    except OSError as error:
        return error.errno or -1


def held_bytes(folder: Path) -> int:
    """Of files that may go while they are counted."""
    held = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            held += path.stat().st_size if path.is_file() else 0
    return held


def test_only_what_is_read_is_fetched_and_once(node: Node) -> None:
    content = files(16)
    digest = node.put("a", content)
    node.start()
    root = node.mount(digest)
    assert sorted(os.listdir(root)) == sorted(content)
    assert node.service.stats()["fetches"] == 0  # names are in the metadata
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(reads, [root / "f05"] * 8))
    assert found == [content["f05"]] * 8
    fetched = node.service.stats()["fetched_bytes"]
    assert MIB <= fetched <= 16 * MIB * 0.15
    assert node.service.fetched_bytes([digest, "other"]) == fetched
    assert node.service.fetched_bytes(["other"]) == 0
    forget_pages(root / "f05")
    assert reads(root / "f05") == content["f05"]
    assert node.service.stats()["fetched_bytes"] == fetched


def test_what_programs_begin_with_comes_before_it_is_read(node: Node) -> None:
    """On a node that has nothing of the layer yet; the rest is still left to be asked for."""
    content = files(15) | {"bin/sh": os.urandom(MIB)}
    digest = node.put("a", content)
    node.start()
    node.layer(digest)
    eventually(lambda: node.service.stats()["fetched_bytes"] >= MIB)
    root = node.mount(digest)
    assert reads(root / "bin/sh") == content["bin/sh"]
    assert node.service.stats()["ahead"] == 0
    assert MIB <= node.service.stats()["fetched_bytes"] <= MIB + 2 * 256 * 1024
    assert reads(root / "f05") == content["f05"]


@pytest.mark.parametrize("count", [1_500, 5_000])
def test_metadata_of_several_pieces_is_whole(node: Node, count: int) -> None:
    """Within those that are asked for before its size is known, and beyond them."""
    content = {f"f{number:04}": os.urandom(1_000) for number in range(count)}
    digest = node.put("a", content)
    assert len(node.s3.get(node.key(digest, META_NAME))) > (4 * MIB if count > 4_000 else MIB)
    node.start()
    root = node.mount(digest)
    assert {name: reads(root / name) for name in sorted(os.listdir(root))} == content
    assert node.service.faults(0) == []


def test_layers_of_an_image_are_asked_for_side_by_side(node: Node) -> None:
    """While the store answers nothing, there are more questions than one layer has."""
    content = {name: files(2, 20_000) for name in ("a", "b", "c", "d")}
    digests = [node.put(name, content[name]) for name in content]
    node.start(layers_request_s=WAIT_S, layers_prepare_deadline_s=WAIT_S)
    node.layer(digests[0])
    node.proxy.mode = "hang"
    node.proxy.drop()
    before = node.proxy.connections
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(node.service.prepare, digests)
        eventually(lambda: node.proxy.connections - before > 2 * ONE_LAYER)
        node.proxy.mode = "open"
        assert [layer.digest for layer in asked.result(WAIT_S)] == digests
    for digest, wanted in zip(digests, content.values(), strict=True):
        root = node.mount(digest)
        assert {name: reads(root / name) for name in os.listdir(root)} == wanted
    with pytest.raises(NotFound):
        node.service.prepare([digests[0], "0" * 64])


def test_wrong_words_about_what_is_read_first_do_no_harm(node: Node) -> None:
    content = files(4)
    digest = node.put("a", content)
    key = node.key(digest, "manifest.json")
    manifest = msgspec.json.decode(node.s3.get(key))
    node.s3.put(key, msgspec.json.encode(manifest | {"first": [10**9, -1, 3, 3, 15]}))
    node.start()
    root = node.mount(digest)
    assert [reads(root / name) for name in content] == list(content.values())


def test_a_damaged_chunk_is_an_error_told_and_all_else_goes_on(node: Node) -> None:
    """(I11) It is asked for twice, never handed on, and right as soon as the store is."""
    content = files(8)
    digest = node.put("a", content)
    whole = node.change(digest, "data.blob", 3 * MIB + 5)
    node.start()
    root = node.mount(digest)
    assert reads(root / "f03") == errno.EIO
    assert {n: reads(root / n) for n in content if n != "f03"} == {
        n: c for n, c in content.items() if n != "f03"
    }
    fault = node.service.faults(0)[0]
    assert (fault.kind, fault.digest, fault.chunk) == ("damaged", digest, 12)
    node.s3.put(node.key(digest, "data.blob"), whole)
    assert reads(root / "f03") == content["f03"]


@pytest.mark.parametrize("name", ["meta.erofs", "chunks.sha256", "manifest.json"])
def test_damaged_metadata_is_refused_before_it_is_mounted(node: Node, name: str) -> None:
    """(L25) Nor is anything kept of the data that came beside it."""
    digest = node.put("a", files(1) | {"bin/sh": os.urandom(MIB)})
    node.change(digest, name, 20)
    node.start()
    with pytest.raises(Internal, match="damaged") as caught:
        node.layer(digest)
    assert caught.value.cause == "image" and caught.value.is_infra
    assert [path.name for path in (node.root / "cache").iterdir()] == []
    with pytest.raises(NotFound):
        node.layer("ab" * 32)


def test_cut_answers_give_right_bytes_or_an_error(node: Node) -> None:
    """(I11)"""
    content = files(12)
    digest = node.put("a", content)
    node.start(layers_request_retries=0, layers_cache_bytes=2 * MIB)
    root = node.mount(digest)
    node.proxy.cut_every = 3
    for _ in range(3):
        for name, right in content.items():
            assert reads(root / name) in (right, errno.EIO)
            forget_pages(root / name)
    assert node.proxy.connections > 6
    node.proxy.cut_every = 0
    assert all(reads(root / name) == right for name, right in content.items())


@pytest.mark.parametrize("mode", ["away", "hang"])
def test_a_store_that_fails_is_an_error_in_time_and_comes_back(node: Node, mode: str) -> None:
    """(I13) What was read before is still there; the rest fails at the deadline."""
    content = files(4)
    digest = node.put("a", content)
    node.start(layers_read_deadline_s=DEADLINE_S, layers_request_s=0.5)
    root = node.mount(digest)
    eventually(lambda: reads(root / "f00") == content["f00"])  # the store may be slow itself
    forget_pages(root / "f00")
    node.proxy.mode = mode  # type: ignore[assignment]
    node.proxy.drop()
    began = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        failing = list(pool.map(reads, [root / name for name in ("f01", "f02", "f03")]))
        assert failing == [errno.EIO] * 3
    assert time.monotonic() - began < WAIT_S
    assert reads(root / "f00") == content["f00"]
    assert {fault.kind for fault in node.service.faults(0)} & {"unavailable", "deadline"}
    node.proxy.mode = "open"
    node.proxy.drop()
    eventually(lambda: [reads(root / name) for name in content] == list(content.values()))


def test_a_short_outage_of_the_store_is_not_noticed(node: Node) -> None:
    """(I13)"""
    content = files(2)
    digest = node.put("a", content)
    node.start(layers_request_s=0.5)
    root = node.mount(digest)
    node.proxy.mode = "away"
    node.proxy.drop()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(reads, root / "f01")
        time.sleep(1)
        assert not reading.done()
        node.proxy.mode = "open"
        assert reading.result(WAIT_S) == content["f01"]


def test_a_killed_service_is_there_again_for_the_reader_that_waits(node: Node) -> None:
    """(I13)"""
    content = files(6)
    digest = node.put("a", content)
    node.start()
    root = node.mount(digest)
    assert reads(root / "f00") == content["f00"]
    for number in range(1, 3):
        node.proxy.mode = "hang"
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(reads, root / f"f0{number}")
            time.sleep(0.2)
            pid = node.pid()
            os.kill(pid, signal.SIGKILL)
            eventually(lambda pid=pid: not alive(pid))
            node.proxy.mode = "open"
            assert reading.result(WAIT_S) == content[f"f0{number}"]
        assert node.pid() != pid
    assert node.service.stats()["open"] == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_another_keeper_takes_over_what_is_open(node: Node, number: int) -> None:
    """(I13)"""
    content = files(4)
    digest = node.put("a", content)
    node.start()
    root = node.mount(digest)
    pid = node.pid()
    node.stop_keeper(number)
    assert alive(pid) and reads(root / "f00") == content["f00"]
    connection = node.layer(digest).origin
    node.start()
    eventually(lambda: node.pid() != pid)
    eventually(lambda: not alive(pid))
    assert node.layer(digest).origin == connection
    assert reads(root / "f01") == content["f01"]


def test_after_the_death_of_both_new_mounts_work(node: Node) -> None:
    content = files(2)
    digest = node.put("a", content)
    node.start()
    root, before = node.mount(digest), node.layer(digest)
    pid = node.pid()
    node.stop_keeper(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: not alive(pid))
    assert isinstance(reads(root / "f00"), int)
    node.start()
    assert node.layer(digest).origin != before.origin
    assert reads(node.mount(digest) / "f01") == content["f01"]


def test_without_keeper_and_readers_the_service_ends(node: Node) -> None:
    digest = node.put("a", files(1))
    node.start()
    node.mount(digest)
    pid = node.pid()
    node.stop_keeper(signal.SIGKILL)
    time.sleep(0.2)
    assert alive(pid)
    node.unmount()
    eventually(lambda: not alive(pid))


def test_the_cache_keeps_its_cap_and_what_is_in_use(node: Node) -> None:
    """(T09)"""
    cap = 8 * MIB
    contents = [files(3) for _ in range(5)]
    layers = [(node.put(f"l{n}", content), content) for n, content in enumerate(contents)]
    node.start(layers_cache_bytes=cap, layers_hold_s=0, layers_hot_chunks=1)
    pinned, right = layers[0]
    root = node.mount(pinned)
    assert [reads(root / name) for name in right] == list(right.values())
    for digest, content in layers[1:]:
        other = node.mount(digest)
        assert [reads(other / name) for name in content] == list(content.values())
        os.close(node.fds.pop())
        assert node.service.stats()["cache_bytes"] <= cap
        assert held_bytes(node.root / "cache") <= cap + 2 * MIB
    assert node.service.stats()["evicted"] > 0
    before = node.service.stats()["fetched_bytes"]
    for name, content in right.items():
        forget_pages(root / name)
        assert reads(root / name) == content
    assert node.service.stats()["fetched_bytes"] == before


def test_a_full_disk_slows_reading_down_and_stops_nothing(node: Node) -> None:
    """(I15)"""
    content = files(6)
    digest = node.put("a", content)
    node.root.mkdir()
    disk = node.folder / "disk"
    disk.write_bytes(b"")
    os.truncate(disk, 6 * MIB)
    run("mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", str(disk))
    run("mount", "-o", "loop", str(disk), str(node.root))
    try:
        node.start(layers_reserve_bytes=MIB, layers_hot_chunks=4)
        root = node.mount(digest)
        for _ in range(2):
            for name, right in content.items():
                assert reads(root / name) == right
                forget_pages(root / name)
        assert 0 < node.service.stats()["cache_bytes"] < 6 * MIB
    finally:
        node.unmount()
        node.stop_keeper()
        run("umount", str(node.root))


def test_what_an_earlier_process_left_is_checked_before_it_is_used(node: Node) -> None:
    """(I11) A chunk's file that changed while nobody served is fetched again."""
    content = files(2)
    digest = node.put("a", content)
    node.start()
    root = node.mount(digest)
    assert reads(root / "f00") == content["f00"]
    eventually(lambda: len(list((node.root / "cache" / digest).glob("[0-9]*"))) >= 4)
    node.stop()
    chunk = node.root / "cache" / digest / "1"
    chunk.write_bytes(os.urandom(chunk.stat().st_size))
    (node.root / "cache" / digest / "2").write_bytes(b"short")
    node.start()
    root = node.mount(digest)
    assert reads(root / "f00") == content["f00"]
    assert 0 < node.service.stats()["fetched_bytes"] <= 2 * MIB


def test_what_the_first_reader_needed_is_fetched_ahead_for_the_next(node: Node) -> None:
    content = files(8)
    digest = node.put("a", content)
    node.start(layers_hold_s=0)
    root = node.mount(digest)
    assert reads(root / "f03") == content["f03"] and reads(root / "f06") == content["f06"]
    node.unmount()
    folder = node.root / "cache" / digest
    eventually(lambda: (folder / PROFILE).exists())
    eventually(lambda: node.service.traces(0))
    (trace,) = node.service.traces(0)
    assert (trace.digest, trace.units) == (digest, sorted(set(trace.units)))
    assert 0 < len(trace.units) * trace.unit_bytes < sum(map(len, content.values()))
    assert node.service.traces(trace.number) == []
    node.stop()
    for chunk in folder.glob("[0-9]*"):
        chunk.unlink()
    node.start()
    root = node.mount(digest)
    ahead = len(trace.units) * trace.unit_bytes
    eventually(lambda: node.service.stats()["fetched_bytes"] >= ahead)
    fetched = node.service.stats()["fetched_bytes"]
    assert reads(root / "f06") == content["f06"]
    assert node.service.stats()["fetched_bytes"] == fetched <= 3 * MIB


def test_a_layer_asked_for_by_many_at_once_is_fetched_once(node: Node) -> None:
    digest = node.put("a", files(1))
    node.start()
    before = node.proxy.connections
    results: list[str] = []
    threads = [
        threading.Thread(target=lambda: results.append(node.layer(digest).origin))
        for _ in range(10)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(results) == 10 and len(set(results)) == 1
    assert node.proxy.connections - before <= ONE_LAYER + 1  # with the worker's first
