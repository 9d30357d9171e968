"""The folder store: whole layers or none."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from shared.blobs.folder import FolderStore
from shared.blobs.layout import DATA_CHUNK_BYTES, Damaged, LayerFiles, LayerManifest
from shared.blobs.opening import StoreSettings, open_store
from shared.blobs.scratch import disk_errors
from shared.errors import InvalidRequest, NotFound, Unavailable, Unsupported


def layer(work: Path, content: bytes = b"meta") -> LayerFiles:
    """Files as the writer leaves them; the store does not look into them."""
    folder = work / "layer0"
    folder.mkdir()
    (folder / "meta.erofs").write_bytes(content)
    return LayerFiles(
        digest=hashlib.sha256(content).hexdigest(),
        meta_path=folder / "meta.erofs",
        data_path=None,
        chunks_path=None,
        meta_bytes=len(content),
        data_bytes=0,
        data_digest="",
        entries=1,
    )


def test_a_put_layer_is_whole_read_only_and_its_own_manifest(tmp_path: Path) -> None:
    store = open_store(StoreSettings(store_url=f"file://{tmp_path}/with%20space"))
    assert isinstance(store, FolderStore)
    assert store.root == tmp_path / "with space"
    with store.workspace() as work:
        files = layer(work)
        store.put_layer(files)
    assert list(store.list()) == [files.digest]
    assert store.has(files.digest)
    assert store.manifest(files.digest).meta_bytes == 4
    assert store.paths(files.digest).data is None
    with store.open(files.digest, "meta.erofs") as file:
        assert file.read() == b"meta"
    assert store.paths(files.digest).meta.stat().st_mode & 0o777 == 0o444
    assert list((store.root / "tmp").iterdir()) == []


def test_putting_twice_is_harmless(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for _ in range(2):
        with store.workspace() as work:
            digest = store.put_layer(layer(work)).digest
    assert list(store.list()) == [digest]


def test_deletion_is_told_and_readers_read_on(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with store.workspace() as work:
        digest = store.put_layer(layer(work)).digest
    with store.open(digest, "meta.erofs") as file:
        assert store.delete(digest)
        assert not store.has(digest)
        assert file.read() == b"meta"
    assert not store.delete(digest)
    with pytest.raises(NotFound):
        store.manifest(digest)


def test_a_sweep_takes_what_a_crash_left_and_leaves_work_in_flight(tmp_path: Path) -> None:
    """(I10)"""
    store = FolderStore(tmp_path)
    left = tmp_path / "tmp" / "crashed"
    left.mkdir()
    (left / "data.blob").write_bytes(b"half")
    (tmp_path / "tmp" / "loose-file").write_bytes(b"x")
    with store.workspace() as work:
        (work / "data.blob").write_bytes(b"working")
        assert FolderStore(tmp_path).sweep() == 2
        assert (work / "data.blob").read_bytes() == b"working"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_workspaces_and_sweeps_at_once_never_lose_work(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            store.sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for number in range(200):
            with store.workspace() as work:
                files = layer(work, b"%d" % number)
                store.put_layer(files)
    finally:
        stop.set()
        sweeper.join()
    assert len(list(store.list())) == 200


@pytest.mark.parametrize("url", ["gs://bucket/x", "http://x", "bucket"])
def test_other_kinds_of_stores_are_refused(url: str) -> None:
    with pytest.raises(Unsupported):
        open_store(StoreSettings(store_url=url))


@pytest.mark.parametrize(
    "url",
    ["file:///", "file:relative", "file://host/x", "s3://", "s3://bucket/x?y", "s3://k:s@b/x"],
)
def test_a_store_needs_a_folder_of_its_own(url: str) -> None:
    with pytest.raises(InvalidRequest):
        open_store(StoreSettings(store_url=url))


@pytest.mark.parametrize("digest", ["", "..", "../../etc", "A" * 64, "0" * 63])
def test_what_is_no_digest_reaches_no_path(tmp_path: Path, digest: str) -> None:
    with pytest.raises(InvalidRequest):
        FolderStore(tmp_path).has(digest)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_a_full_or_failing_disk_is_unavailable(code: int) -> None:
    with pytest.raises(Unavailable), disk_errors():
        raise OSError(code, "disk")


def test_other_errors_are_not_blamed_on_the_disk() -> None:
    with pytest.raises(PermissionError), disk_errors():
        raise PermissionError(errno.EPERM, "no")


def made(folder: Path) -> LayerManifest:
    """A layer with data, as a node makes it in ``folder``."""
    data = os.urandom(300_000)
    digests = b"".join(
        hashlib.sha256(data[at : at + DATA_CHUNK_BYTES]).digest()
        for at in range(0, len(data), DATA_CHUNK_BYTES)
    )
    data_digest = hashlib.sha256(digests).hexdigest()
    meta = b"meta" + data_digest.encode()
    (folder / "meta.erofs").write_bytes(meta)
    (folder / "data.blob").write_bytes(data)
    (folder / "chunks.sha256").write_bytes(digests)
    return LayerManifest(
        digest=hashlib.sha256(meta).hexdigest(), meta_bytes=len(meta), data_bytes=len(data),
        data_digest=data_digest, entries=1,
    )  # fmt: skip


def test_a_layer_that_is_made_elsewhere_is_taken_over_whole(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with store.incoming() as incoming:
        assert incoming.folder is not None
        manifest = made(incoming.folder)
        assert store.adopt(manifest, incoming) == manifest
    assert store.has(manifest.digest)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("fault", ["meta.erofs", "data.blob", "chunks.sha256", "cut", "missing"])
def test_what_did_not_arrive_as_it_was_made_is_refused(tmp_path: Path, fault: str) -> None:
    """(L25) And nothing of it is kept."""
    store = FolderStore(tmp_path)
    with store.incoming() as incoming:
        assert incoming.folder is not None
        manifest = made(incoming.folder)
        data = incoming.folder / "data.blob"
        if fault == "missing":
            data.unlink()
        elif fault == "cut":
            data.write_bytes(data.read_bytes()[:-1])
        else:
            path = incoming.folder / fault
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        with pytest.raises(Damaged):
            store.adopt(manifest, incoming)
    assert list(store.list()) == []
    assert list((tmp_path / "tmp").iterdir()) == []
