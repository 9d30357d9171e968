"""Imports that must not succeed: a typed error, nothing stored, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.imagesvc.importer import Importer
from services.imagesvc.meter import ImportProgress
from services.imagesvc.reading import ImportLimits
from services.imagesvc.sources import DockerSource, ImportRequest, PathSource
from shared.blobs.folder import FolderStore
from shared.erofs import writer as erofs
from shared.erofs.layertree import Inode, LayerTree, unique_inodes
from shared.errors import Conflict, DsecError, Internal, InvalidRequest, Unavailable, Unsupported
from tests.integration.imagesvc.seen import open_files
from tests.unit.services.imagesvc.tars import member, saved_image, tar_bytes

REPOSITORY = Path(__file__).parents[3]


def leftovers(store: FolderStore) -> list[str]:
    return [str(path) for part in ("layers", "tmp") for path in (store.root / part).iterdir()]


def refused(importer: Importer, store: FolderStore, request: ImportRequest) -> DsecError:
    before = open_files()
    with pytest.raises(DsecError) as caught:
        importer.run_blocking(request)
    assert leftovers(store) == []
    assert open_files() <= before
    return caught.value


def archive(tmp_path: Path, data: bytes) -> ImportRequest:
    path = tmp_path / "archive"
    path.write_bytes(data)
    return ImportRequest(PathSource(path))


def test_a_truncated_archive_leaves_nothing(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    layer = tar_bytes([member("a", os.urandom(5000)), member("b", os.urandom(5000))])
    for padded in (layer, saved_image([layer])):
        whole = padded.rstrip(b"\0")  # the padding after the end is worth nothing
        for share in (0.01, 0.3, 0.6, 0.8):
            cut = archive(tmp_path, whole[: int(len(whole) * share)])
            assert isinstance(refused(importer, store, cut), InvalidRequest)


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, bytes(100)])
def test_what_is_no_archive_is_refused(
    tmp_path: Path, importer: Importer, store: FolderStore, data: bytes
) -> None:
    error = refused(importer, store, archive(tmp_path, data))
    assert (error.code, error.field) == ("invalid_request", "archive")


def test_a_path_that_is_not_there_or_no_file_is_refused(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing", "pipe"):
        error = refused(importer, store, ImportRequest(PathSource(tmp_path / name)))
        assert (error.code, error.field) == ("invalid_request", "path")


def test_a_layer_with_another_digest_is_told_as_such_even_if_it_is_no_tar(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    layer = tar_bytes([member("a", b"x" * 9999)])
    for damaged in (layer.replace(b"x" * 512, b"y" * 512), layer.replace(b"ustar", b"\xff" * 5)):
        data = saved_image([layer]).replace(layer, damaged)
        error = refused(importer, store, archive(tmp_path, data))
        assert "digest mismatch" in error.message


def test_a_bad_layer_above_a_good_one_leaves_neither(tmp_path: Path, store: FolderStore) -> None:
    importer = Importer(store, limits=ImportLimits(collapse_bytes_max=0))
    layers = [tar_bytes([member("a", b"x" * 9999)]), tar_bytes([member("../b", b"y")])]
    assert refused(importer, store, archive(tmp_path, saved_image(layers))).field == "archive"
    importer.close()


def test_an_engine_that_is_not_configured_is_unsupported(
    importer: Importer, store: FolderStore
) -> None:
    error = refused(importer, store, ImportRequest(DockerSource("x")))
    assert isinstance(error, Unsupported)


def test_an_engine_whose_stream_breaks_leaves_nothing(store: FolderStore) -> None:
    class Breaking:
        def save(self, reference: str) -> Iterator[bytes]:
            yield saved_image([tar_bytes([member("a", b"x" * 9999)])])[:4096]
            raise Unavailable("stream cut", field="docker")

    importer = Importer(store, engine=Breaking())
    assert isinstance(refused(importer, store, ImportRequest(DockerSource("x"))), Unavailable)
    importer.close()


def test_more_data_than_allowed_is_refused(tmp_path: Path, store: FolderStore) -> None:
    importer = Importer(store, limits=ImportLimits(unpacked_bytes_max=1000, entries_max=2))
    big = archive(tmp_path, tar_bytes([member("a", bytes(1001))]))
    assert "limit" in refused(importer, store, big).message
    many = archive(tmp_path, tar_bytes([member(name, b"") for name in "abc"]))
    assert "more than 2" in refused(importer, store, many).message
    importer.close()


def test_a_full_disk_is_unavailable_and_leaves_nothing(tmp_path: Path) -> None:
    """(I15)"""
    source = tmp_path / "tree"
    source.mkdir()
    (source / "big").write_bytes(os.urandom(16 << 20))
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", small], check=True)
    try:
        store = FolderStore(small / "store")
        importer = Importer(store)
        error = refused(importer, store, ImportRequest(PathSource(source)))
        assert isinstance(error, Unavailable)
        assert error.retryable
        importer.close()
    finally:
        subprocess.run(["umount", small], check=True)


class Meddler:
    """Changes a tree as soon as its contents are being written."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, state: ImportProgress) -> None:
        if state.stage == "writing":
            self.path.write_bytes(b"changed meanwhile")


@pytest.mark.parametrize("name", ["existing", "new"])
def test_a_directory_that_changes_meanwhile_is_refused(
    tmp_path: Path, importer: Importer, store: FolderStore, name: str
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "existing").write_bytes(b"as it was when the import began")
    with pytest.raises(Conflict) as caught:
        importer.run_blocking(ImportRequest(PathSource(tree)), progress=Meddler(tree / name))
    assert caught.value.field == "path"
    assert leftovers(store) == []


def swap_to_link(tree: Path, outside: Path) -> None:
    (tree / "d").rename(tree / "moved")
    (tree / "d").symlink_to(outside)


def test_a_directory_swapped_for_a_link_is_not_followed(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    tree, outside = tmp_path / "tree", tmp_path / "outside"
    for made in (tree / "d", outside):
        made.mkdir(parents=True)
        (made / "f").write_bytes(b"secret" if made is outside else b"public")

    def swap(state: ImportProgress) -> None:
        if state.stage == "writing":
            swap_to_link(tree, outside)

    with pytest.raises(Conflict):
        importer.run_blocking(ImportRequest(PathSource(tree)), progress=swap)
    assert leftovers(store) == []


def changed(root: Inode, **fields: object) -> Inode:
    """A copy of the tree in which the file ``f`` is not as it should be."""
    tree = LayerTree()
    tree.root.children = dict(root.children)
    tree.root.mode, tree.root.mtime_ns = root.mode, root.mtime_ns
    wrong = replace(root.children[b"f"], **fields)  # type: ignore[arg-type]
    tree.root.children[b"f"] = wrong
    return tree.root


@pytest.mark.parametrize(
    "fields",
    [{"mode": 0o100600}, {"uid": 7}, {"gid": 7}, {"mtime_ns": 5}, {"xattrs": {}}, {"size": 3}],
    ids=str,
)
def test_a_wrong_conversion_is_refused_and_names_the_entry(
    tmp_path: Path,
    importer: Importer,
    store: FolderStore,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
) -> None:
    """(I16) The writer is made to err; the check of the result must see it."""
    right = erofs.encode

    def wrong(root: Inode, placements: dict[int, object], **rest: object) -> bytes:
        other = changed(root, **fields)
        for (_, old), (_, new) in zip(unique_inodes(root), unique_inodes(other), strict=True):
            if id(old) in placements:
                placements[id(new)] = placements[id(old)]
        if "size" in fields:
            f = other.children[b"f"]
            placements[id(f)] = erofs.Placement(inline=b"abc")
        return right(other, placements, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(erofs, "encode", wrong)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(b"abcd")
    os.setxattr(tree / "f", "user.x", b"y")
    error = refused(importer, store, ImportRequest(PathSource(tree)))
    assert isinstance(error, Internal)
    assert error.details["path"] == "/f"


def test_a_damaged_blob_is_seen(
    tmp_path: Path, importer: Importer, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = erofs.encode

    def damage(*arguments: object, **rest: object) -> bytes:
        (blob,) = store.root.glob("tmp/*/layer0/data.blob")
        with open(blob, "r+b") as file:
            file.seek(5000)
            file.write(b"!")
        return right(*arguments, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(erofs, "encode", damage)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "f").write_bytes(bytes(10_000))
    assert isinstance(refused(importer, store, ImportRequest(PathSource(tree))), Internal)


def test_a_killed_import_leaves_nothing_after_the_next_start(
    tmp_path: Path, store: FolderStore
) -> None:
    """(I10) SIGKILL while the blob is written: no layer, and the sweep takes the rest."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(64):
        (tree / str(number)).write_bytes(os.urandom(4 << 20))
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from shared.blobs.folder import FolderStore\n"
        "from services.imagesvc.importer import Importer\n"
        "from services.imagesvc.sources import ImportRequest, PathSource\n"
        "def kill(state):\n"
        "    if state.done_bytes > 64 << 20: os.kill(os.getpid(), 9)\n"
        "importer = Importer(FolderStore(Path(sys.argv[1])))\n"
        "importer.run_blocking(ImportRequest(PathSource(Path(sys.argv[2]))), progress=kill)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, store.root, tree], cwd=REPOSITORY)
    assert done.returncode == -signal.SIGKILL
    assert list((store.root / "layers").iterdir()) == []
    assert len(list((store.root / "tmp").iterdir())) == 1
    assert store.sweep() == 1
    assert leftovers(store) == []


async def test_a_cancelled_import_stops_and_leaves_nothing(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(40):
        (tree / str(number)).write_bytes(os.urandom(1 << 20))
    begun = asyncio.Event()
    running = asyncio.create_task(
        importer.run(ImportRequest(PathSource(tree)), progress=lambda state: begun.set())
    )
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert leftovers(store) == []


async def test_progress_is_told_on_the_event_loop_and_adds_up(
    tmp_path: Path, importer: Importer
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(10):
        (tree / str(number)).write_bytes(os.urandom(1 << 20))
    told: list[tuple[ImportProgress, str]] = []
    await importer.run(
        ImportRequest(PathSource(tree)),
        progress=lambda state: told.append((state, threading.current_thread().name)),
    )
    states = [state for state, _ in told]
    assert {thread for _, thread in told} == {threading.main_thread().name}
    assert states[0].stage == "writing"
    assert states[-1] == ImportProgress("storing", 10 << 20, 10 << 20)
    assert states == sorted(states, key=lambda state: state.done_bytes)


async def test_the_same_image_imported_at_once_is_stored_once(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "f").write_bytes(os.urandom(1 << 20))
    request = ImportRequest(PathSource(tmp_path / "tree"))
    results = await asyncio.gather(*(importer.run(request) for _ in range(4)))
    assert len({tuple(result.layers) for result in results}) == 1
    assert list(store.list()) == results[0].layers
