"""The object store against a real S3 server: whole layers or none, typed errors."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shared.blobs.base import BlobStore
from shared.blobs.layout import FIRST_MIN, Damaged, LayerFiles
from shared.blobs.opening import StoreSettings, open_store
from shared.errors import NotFound, Unavailable
from tests.s3server import SECRET, S3Server

pytestmark = pytest.mark.integration


def layer(work: Path, data: bytes = b"") -> LayerFiles:
    """Files as the writer leaves them."""
    folder = work / "layer0"
    folder.mkdir()
    data = data or os.urandom(20 << 20)  # more than one part
    chunks = [hashlib.sha256(data[at : at + 262144]).digest() for at in range(0, len(data), 262144)]
    content = {"meta.erofs": os.urandom(4096), "data.blob": data, "chunks.sha256": b"".join(chunks)}
    for name, value in content.items():
        (folder / name).write_bytes(value)
    return LayerFiles(
        digest=hashlib.sha256(content["meta.erofs"]).hexdigest(),
        meta_path=folder / "meta.erofs", data_path=folder / "data.blob",
        chunks_path=folder / "chunks.sha256", meta_bytes=4096, data_bytes=len(data),
        data_digest=hashlib.sha256(content["chunks.sha256"]).hexdigest(), entries=1,
    )  # fmt: skip


@pytest.fixture
def store(s3: S3Server, tmp_path: Path) -> BlobStore:
    return open_store(s3.store_settings(tmp_path.name), scratch=tmp_path / "scratch")


async def test_a_put_layer_is_read_whole_and_by_ranges(store: BlobStore, tmp_path: Path) -> None:
    with store.workspace() as work:
        files = layer(work)
        data = files.data_path.read_bytes() if files.data_path else b""
        assert not store.has(files.digest)
        manifest = store.put_layer(files)
        assert store.put_layer(files) == manifest
    assert list(store.list()) == [files.digest] and store.ready()
    assert store.manifest(files.digest) == manifest == await store.fetch_manifest(files.digest)
    inside = await store.fetch(files.digest, "data.blob", 5 << 20, 300_000)
    assert inside == data[5 << 20 :][:300_000]
    assert await store.fetch(files.digest, "data.blob", len(data) - 10, 4096) == data[-10:]
    assert list((tmp_path / "scratch").iterdir()) == []


async def test_a_layer_without_its_manifest_is_not_there(
    s3: S3Server, store: BlobStore, tmp_path: Path
) -> None:
    """(I10) An upload that a crash cut is no layer; deleting it takes what is there."""
    digest = "ab" * 32
    for name in ("meta.erofs", "data.blob"):
        s3.put(f"{tmp_path.name}/layers/{digest}/{name}", b"half")
    assert not store.has(digest) and list(store.list()) == []
    with pytest.raises(NotFound):
        await store.fetch_manifest(digest)
    assert store.delete(digest) and not store.delete(digest)
    with pytest.raises(NotFound):
        await store.fetch(digest, "data.blob", 0, 1)


async def test_a_damaged_manifest_is_an_error(
    s3: S3Server, store: BlobStore, tmp_path: Path
) -> None:
    s3.put(f"{tmp_path.name}/layers/{'cd' * 32}/manifest.json", b"{")
    with pytest.raises(Damaged):
        await store.fetch_manifest("cd" * 32)


async def test_a_store_that_is_away_is_unavailable_soon_and_tells_no_secret(
    tmp_path: Path,
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        away = StoreSettings(
            store_url="s3://layers/x", store_endpoint=f"http://127.0.0.1:{probe.getsockname()[1]}",
            store_key_id="id", store_secret=SECRET,
        )  # fmt: skip
        store = open_store(away, scratch=tmp_path, retries=1)
        with pytest.raises(Unavailable) as caught:
            await store.fetch("ab" * 32, "data.blob", 0, 1)
        assert not store.ready()
        assert SECRET not in repr(caught.value) and SECRET not in repr(store)


async def test_a_store_that_never_answers_is_unavailable_in_time(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        held: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    held.append(silent.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        settings = StoreSettings(
            store_url="s3://layers/x", store_key_id="id", store_secret="s",
            store_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}",
        )  # fmt: skip
        store = open_store(settings, scratch=tmp_path, retries=0, request_s=0.5)
        began = time.monotonic()
        with pytest.raises(Unavailable):
            await store.fetch("ab" * 32, "data.blob", 0, 1)
        assert time.monotonic() - began < 60
        silent.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


def test_what_is_read_first_is_added_to_a_layers_manifest(
    store: BlobStore, tmp_path: Path
) -> None:
    """Within a share of the layer; a layer that is gone stays gone."""
    with store.workspace() as work:
        files = replace(layer(work), first=(7, 3))
        store.put_layer(files)
    store.hint(files.digest, [3, 9, -1, 10**6])
    assert store.manifest(files.digest) == replace(files, first=(7, 3, 9)).manifest()
    store.hint(files.digest, range(80))
    found = store.manifest(files.digest).first
    assert (found[:3], len(found)) == ((7, 3, 9), FIRST_MIN)
    store.delete(files.digest)
    store.hint(files.digest, [1])
    assert not store.has(files.digest) and list(store.list()) == []
