"""Images of several layers: whiteouts, opaque directories, collapse, as overlay sees them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.imagesvc.importer import Importer
from services.imagesvc.reading import ImportLimits
from services.imagesvc.sources import ImportRequest, PathSource
from shared.blobs.folder import FolderStore
from shared.errors import InvalidRequest
from tests.integration.imagesvc.seen import Entry, manifest, mounted
from tests.unit.services.imagesvc.tars import (
    Member,
    folder,
    hardlink,
    member,
    saved_image,
    symlink,
    tar_bytes,
)

APART = ImportLimits(collapse_bytes_max=0)
TOGETHER = ImportLimits()


def import_layers(
    scratch: Path, layers: list[list[Member]], limits: ImportLimits
) -> tuple[FolderStore, list[str]]:
    archive = scratch / "image.tar"
    archive.write_bytes(saved_image([tar_bytes(layer) for layer in layers]))
    store = FolderStore(scratch / "store")
    importer = Importer(store, limits=limits)
    try:
        return store, importer.run_blocking(ImportRequest(PathSource(archive))).layers
    finally:
        importer.close()


def view(scratch: Path, layers: list[list[Member]], limits: ImportLimits) -> dict[bytes, Entry]:
    store, digests = import_layers(scratch, layers, limits)
    with mounted(store, digests) as root:
        return manifest(root, hide_overlay=True)


LAYERED: list[list[Member]] = [
    [folder("d"), member("d/old", b"1"), member("gone", b"2"), member("e/x", b"3")],
    [member(".wh.gone", b""), member("d/.wh..wh..opq", b""), member("d/new", b"4"),
     member("e/.wh.x", b""), member("big", b"5" * 5000)],
    [folder("gone"), member("gone/again", b"6"), hardlink("linked", "big")],
]  # fmt: skip


@pytest.mark.parametrize("limits", [APART, TOGETHER], ids=["apart", "together"])
def test_deleted_names_are_neither_listed_nor_found(tmp_path: Path, limits: ImportLimits) -> None:
    """(I01) Through a real overlay mount."""
    store, digests = import_layers(tmp_path, LAYERED, limits)
    assert len(digests) == (3 if limits is APART else 1)
    with mounted(store, digests) as root:
        top = f"/proc/self/fd/{root}"
        assert set(os.listdir(top)) == {"d", "e", "gone", "big", "linked"}
        assert os.listdir(f"{top}/d") == ["new"]
        assert os.listdir(f"{top}/e") == []
        with pytest.raises(FileNotFoundError):
            os.stat(f"{top}/e/x")
        assert os.listdir(f"{top}/gone") == ["again"]
        with open(f"{top}/linked", "rb") as file:
            assert file.read() == b"5" * 5000


def test_only_the_trusted_opaque_mark_is_written(tmp_path: Path) -> None:
    """(I03)"""
    store, digests = import_layers(tmp_path, LAYERED, APART)
    with mounted(store, digests[1:2]) as root:
        assert os.listxattr(f"/proc/self/fd/{root}/d") == ["trusted.overlay.opaque"]
        assert os.getxattr(f"/proc/self/fd/{root}/d", "trusted.overlay.opaque") == b"y"


def test_a_hard_link_alone_in_its_layer_has_its_content(tmp_path: Path) -> None:
    """(I06)"""
    layers = [[member("a", b"x" * 4096)], [hardlink("b", "a")]]
    for number, limits in enumerate((APART, TOGETHER)):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        seen = view(scratch, layers, limits)
        assert seen[b"b"].sha256 == seen[b"a"].sha256
        assert seen[b"b"].size == 4096


def test_deleted_content_is_not_in_the_stored_layer(tmp_path: Path) -> None:
    secret = b"reference answer " * 500
    layers = [[member("secret", secret), member("f", b"y" * 5000)], [member(".wh.secret", b"")]]
    store, (digest,) = import_layers(tmp_path, layers, TOGETHER)
    data = store.paths(digest).data
    assert data is not None
    assert b"reference answer" not in data.read_bytes()


def test_a_hundred_layers_are_all_there(tmp_path: Path) -> None:
    """(I07, I08)"""
    layers = [[member(f"layer{n}", b"%d" % n)] for n in range(120)]
    for number, (limits, count) in enumerate(((APART, 120), (TOGETHER, 1))):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        store, digests = import_layers(scratch, layers, limits)
        assert len(digests) == count
        with mounted(store, digests) as root:
            assert len(os.listdir(f"/proc/self/fd/{root}")) == 120


PARTS = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3).map("/".join)
CHANGES = st.one_of(
    st.tuples(st.just("file"), PARTS, st.integers(0, 9)),
    st.tuples(st.just("dir"), PARTS, st.sampled_from([0o755, 0o700])),
    st.tuples(st.just("whiteout"), PARTS, st.none()),
    st.tuples(st.just("opaque"), PARTS, st.none()),
    st.tuples(st.just("symlink"), PARTS, st.sampled_from(["a", "b/c", "/c"])),
)


def as_members(changes: list[tuple[str, str, object]]) -> list[Member]:
    """A layer that an engine could have made: parents are directories of their own."""
    made: dict[str, Member] = {}
    blocked: set[str] = set()
    for kind, path, value in changes:
        parents = [path.rsplit("/", n)[0] for n in range(path.count("/"), 0, -1)]
        if path in made or path in blocked or any(p in blocked for p in parents):
            continue
        for parent in parents:
            made.setdefault(parent, folder(parent))
        head, _, name = path.rpartition("/")
        if kind in ("file", "symlink", "whiteout"):
            blocked.add(path)
        if kind == "file":
            made[path] = member(path, b"%d" % value * 2000)  # type: ignore[operator]
        elif kind == "symlink":
            made[path] = symlink(path, str(value))
        elif kind == "whiteout":
            made[path] = member(f"{head}/.wh.{name}".lstrip("/"), b"")
        else:
            made[path] = folder(path, value if isinstance(value, int) else 0o755)
            if kind == "opaque":
                made[path + "/.wh..wh..opq"] = member(path + "/.wh..wh..opq", b"")
    return list(made.values())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(CHANGES, max_size=8), min_size=1, max_size=4), st.integers(0, 8000))
def test_collapsed_layers_show_what_overlay_shows_of_them(
    drawn: list[list[tuple[str, str, object]]], threshold: int
) -> None:
    """Apart, partly and wholly collapsed: one and the same tree, by the kernel's own overlay."""
    layers = [as_members(changes) for changes in drawn]
    views = []
    for limits in (APART, ImportLimits(collapse_bytes_max=threshold), TOGETHER):
        with tempfile.TemporaryDirectory() as scratch:
            views.append(view(Path(scratch), layers, limits))
    assert views[0] == views[1]
    assert views[0] == views[2]


def test_a_workspace_hides_what_its_base_has(tmp_path: Path, store: FolderStore) -> None:
    importer = Importer(store)
    base, workspace = tmp_path / "base", tmp_path / "workspace.tar"
    (base / "workspace").mkdir(parents=True)
    (base / "workspace" / "stale").write_bytes(b"old")
    workspace.write_bytes(tar_bytes([folder("./"), member(".wh.stale", b""), member("f", b"new")]))
    below = importer.run_blocking(ImportRequest(PathSource(base))).layers
    above = importer.run_blocking(
        ImportRequest(
            PathSource(workspace), kind="workspace", prefix="/workspace", owner=(1000, 1000)
        )
    ).layers
    importer.close()
    with mounted(store, below + above) as root:
        seen = manifest(root, hide_overlay=True)
    assert set(seen) == {b"workspace", b"workspace/f"}
    assert (seen[b"workspace/f"].uid, seen[b"workspace"].uid) == (1000, 1000)


def test_a_toolkit_at_the_root_leaves_the_root_directory_alone(
    tmp_path: Path, store: FolderStore
) -> None:
    importer = Importer(store)
    tool = tmp_path / "tool"
    tool.mkdir(mode=0o700)
    (tool / "bin").mkdir()
    layers = importer.run_blocking(
        ImportRequest(PathSource(tool), kind="toolkit", owner=(5, 5))
    ).layers
    importer.close()
    with mounted(store, layers) as root:
        status = os.fstat(root)
        assert (status.st_mode & 0o7777, status.st_uid) == (0o755, 0)


def test_a_change_over_an_opaque_directory_diffs_to_itself(tmp_path: Path) -> None:
    """(I03) What is copied up from a layer brings no mark that would hide things later."""
    store, digests = import_layers(tmp_path, LAYERED, APART)
    mounts = []
    upper, work, top = (tmp_path / name for name in ("upper", "work", "top"))
    try:
        for digest in digests:
            point = tmp_path / digest[:8]
            for made in (point, upper, work, top):
                made.mkdir(exist_ok=True)
            paths = store.paths(digest)
            # mount(8) would take a loop device; the system call takes the file itself.
            mount(paths.meta, point, "erofs", f"device={paths.data}" if paths.data else "")
            mounts.append(point)
        lower = ":".join(str(point) for point in reversed(mounts))
        mount("overlay", top, "overlay", f"lowerdir={lower},upperdir={upper},workdir={work}")
        mounts.append(top)
        (top / "d" / "touched").write_bytes(b"")
        assert {path.relative_to(upper).as_posix() for path in upper.rglob("*")} == {
            "d",
            "d/touched",
        }
        assert "trusted.overlay.opaque" not in os.listxattr(upper / "d")
        assert not [name for name in os.listxattr(upper / "d") if name.startswith("user.")]
    finally:
        for point in reversed(mounts):
            subprocess.run(["umount", point], check=True)


def mount(source: Path | str, target: Path, kind: str, data: str) -> None:

    libc = ctypes.CDLL(None, use_errno=True)
    read_only = 1 if kind == "erofs" else 0
    failed = libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), read_only, data.encode()
    )
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


def test_names_that_leave_the_layer_store_nothing(tmp_path: Path) -> None:
    """Also as what a hard link refers to. A symbolic link is only text, wherever it leads."""
    bad = [member(name, b"2") for name in ("/etc/x", "../x", "a/../../x")]
    bad += [hardlink("linked", target) for target in ("/etc/passwd", "../ok", "ok/../../x")]
    for entry in bad:
        archive = tmp_path / "bad.tar"
        archive.write_bytes(tar_bytes([member("ok", b"1"), entry]))
        store = FolderStore(tmp_path / "store")
        importer = Importer(store)
        with pytest.raises(InvalidRequest, match="name") as caught:
            importer.run_blocking(ImportRequest(PathSource(archive)))
        importer.close()
        assert caught.value.field == "archive"
        assert list(store.list()) == []
