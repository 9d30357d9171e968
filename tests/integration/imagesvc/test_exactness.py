"""A converted tree is the tree: compared through the kernel, entry by entry."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import socket
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from schemas.sandbox import ImageConfig
from services.imagesvc.importer import Importer
from services.imagesvc.layerroot import opened_layer
from services.imagesvc.names import ImageName
from services.imagesvc.ociarchive import write_archive
from services.imagesvc.sources import ImportRequest, PathSource
from shared.blobs.folder import FolderStore
from tests.integration.imagesvc.seen import manifest, mounted

NAMES = st.one_of(
    st.sampled_from([b"a", b"A", b"ab", b"aB", b"-", b"!", b"...", b"\xff\xfe", b"n" * 255]),
    st.binary(min_size=1, max_size=12).filter(
        lambda name: (
            b"/" not in name and b"\0" not in name and name not in (b".", b"..")
            and not name.startswith(b".wh.")  # a deletion, in an exported layer
        )
    ),
)
SIZES = st.sampled_from(
    [0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 8192, 262143, 262144, 262145, 300_000]
)
FILES = st.tuples(st.just("file"), SIZES, st.sampled_from(["random", "same", "zero", "sparse"]))
LINKS = st.tuples(
    st.just("link"), st.binary(min_size=1, max_size=80).filter(lambda target: b"\0" not in target)
)
OTHERS = st.sampled_from(
    [("node", stat.S_IFIFO, 0), ("node", stat.S_IFCHR, os.makedev(300, 70000)),
     ("node", stat.S_IFBLK, os.makedev(8, 1)), ("node", stat.S_IFSOCK, 0), ("hard",)]
)  # fmt: skip
TREES = st.recursive(
    st.one_of(FILES, LINKS, OTHERS),
    lambda below: st.dictionaries(NAMES, below, max_size=8),
    max_leaves=30,
)

# Its last inode ends exactly where a block does (found by a run of the test below).
LAST_INODE_ENDS_THE_BLOCK = {
    b"A": ("file", 1023, "same"),
    b"\x01": {b"ab": ("link", b"\x01"), b"\x01" * 8: {}},
    b"a": ("node", stat.S_IFIFO, 0),
    b"ab": ("node", stat.S_IFIFO, 0),
}


class Builder:
    """Makes a drawn tree on disk, with owners, modes, times and xattrs of all kinds."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._files: list[bytes] = []

    def build(self, path: bytes, node: object) -> None:
        if isinstance(node, dict):
            os.mkdir(path)
            for name, child in node.items():
                self.build(path + b"/" + name, child)
        elif isinstance(node, tuple):
            getattr(self, f"_{node[0]}")(path, *node[1:])
        self._dress(path)

    def _file(self, path: bytes, size: int, kind: str) -> None:
        with open(path, "wb") as file:
            if kind == "random":
                file.write(self._random.randbytes(size))
            elif kind == "same":
                file.write(b"same" * (size // 4 + 1))
                file.truncate(size)
            elif kind == "zero":
                file.write(bytes(size))
            else:
                file.truncate(size * 20)
                file.seek(size * 7)
                file.write(b"data in the middle")
        self._files.append(path)

    def _link(self, path: bytes, target: bytes) -> None:
        os.symlink(target, path)

    def _node(self, path: bytes, kind: int, device: int) -> None:
        os.mknod(path, kind | 0o640, device)

    def _hard(self, path: bytes) -> None:
        if self._files:
            os.link(self._random.choice(self._files), path, follow_symlinks=False)
        else:
            self._file(path, 10, "random")

    def _dress(self, path: bytes) -> None:
        pick = self._random
        uid, gid = pick.choice([0, 1000, 65534, 1516583083, 2**32 - 2]), pick.randrange(2**31)
        os.chown(path, uid, gid, follow_symlinks=False)
        if not os.path.islink(path):
            os.chmod(path, pick.choice([0o755, 0o4711, 0o2750, 0o1777, 0o000, 0o644]))
            if os.path.isdir(path) or os.path.isfile(path):
                for _ in range(pick.randrange(3)):
                    name = pick.choice(["user.x", "user." + "n" * 200, "trusted.t", "security.s"])
                    os.setxattr(path, name, pick.randbytes(pick.choice([0, 1, 40, 900])))
        ns = pick.choice([0, 1, 1_600_000_000_123_456_789, 4_000_000_000_000_000_000])
        os.utime(path, ns=(ns, ns), follow_symlinks=False)


@settings(max_examples=60, deadline=None)
@given(tree=st.dictionaries(NAMES, TREES, max_size=8), seed=st.integers(0, 2**32))
@example(tree=LAST_INODE_ENDS_THE_BLOCK, seed=13801515)
def test_any_tree_survives_and_its_digest_is_its_own(tree: dict[bytes, object], seed: int) -> None:
    """(I16, I17) Also imported twice it is the same layer, and the format's checker agrees."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "tree")
        Builder(seed).build(os.fsencode(source), tree)
        expected = manifest(source)
        importer = Importer(FolderStore(Path(scratch, "store")))
        store = FolderStore(Path(scratch, "store"))
        result = importer.run_blocking(ImportRequest(PathSource(source)))
        again = importer.run_blocking(ImportRequest(PathSource(source)))
        importer.close()
        with mounted(store, result.layers) as root:
            assert manifest(root) == expected
            top = os.fstat(root)
        assert again.layers == result.layers
        assert (top.st_mode, top.st_mtime_ns) == (source.stat().st_mode, source.stat().st_mtime_ns)
        meta = store.paths(result.layers[0])
        _fsck(meta.meta, meta.data)


def _fsck(meta: Path, data: Path | None) -> None:
    """The format's own checker has no complaint."""
    device = [f"--device={data}"] if data else []
    done = subprocess.run(["fsck.erofs", *device, str(meta)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_directory_and_its_tar_are_the_same_layer(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    source = tmp_path / "tree"
    tree = {
        b"d": {b"empty": {}, b"deep": {b"f": ("file", 5000, "random"), b"h": ("hard",)}},
        b"same1": ("file", 4097, "same"), b"same2": ("file", 4097, "same"),
        b"holes": ("file", 300_000, "sparse"), b"dangling": ("link", b"/no/where"),
        b"Case": ("file", 1, "random"), b"case": ("file", 2, "random"),
        b"pipe": ("node", stat.S_IFIFO, 0),
    }  # fmt: skip
    Builder(1).build(os.fsencode(source), tree)
    archive = tmp_path / "tree.tar"
    subprocess.run(
        ["tar", "-C", source, "--format=posix", "--sparse", "--numeric-owner", "--sort=name",
         "--xattrs", "--xattrs-include=*", "-cf", archive, "."],
        check=True,
    )  # fmt: skip
    from_tar = importer.run_blocking(ImportRequest(PathSource(archive)))
    from_directory = importer.run_blocking(ImportRequest(PathSource(source)))
    with mounted(store, from_tar.layers) as root:
        assert manifest(root) == manifest(source)
    assert from_tar.layers == from_directory.layers


@pytest.mark.parametrize(
    "pack",
    [gzip.compress, zstandard.compress, lzma.compress, bz2.compress],
    ids=["gzip", "zstd", "xz", "bzip2"],
)
def test_a_compressed_tar_is_the_same_layer(
    tmp_path: Path, importer: Importer, pack: Callable[[bytes], bytes]
) -> None:
    (tmp_path / "f").write_bytes(os.urandom(100_000))
    plain, packed = tmp_path / "t.tar", tmp_path / "packed"
    subprocess.run(["tar", "-C", tmp_path, "-cf", plain, "f"], check=True)
    packed.write_bytes(pack(plain.read_bytes()))
    assert (
        importer.run_blocking(ImportRequest(PathSource(packed))).layers
        == importer.run_blocking(ImportRequest(PathSource(plain))).layers
    )


def test_file_capabilities_survive_conversion(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    """(I04) As the kernel keeps them: it parses the attribute when it is set and read."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "ping").write_bytes(b"\x7fELF")
    net_raw = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(tree / "ping", "security.capability", net_raw)
    os.setxattr(tree / "ping", "user.note", b"kept")
    layers = importer.run_blocking(ImportRequest(PathSource(tree))).layers
    with mounted(store, layers) as root:
        shown = f"/proc/self/fd/{root}/ping"
        assert os.getxattr(shown, "security.capability") == net_raw
        assert os.getxattr(shown, "user.note") == b"kept"


def test_a_huge_sparse_file_costs_what_it_holds(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "disk", "wb") as file:
        file.truncate(1 << 40)
        file.seek(1 << 39)
        file.write(b"in the middle")
    result = importer.run_blocking(ImportRequest(PathSource(tree)))
    assert result.size_bytes < 128 << 20
    with mounted(store, result.layers) as root, open(f"/proc/self/fd/{root}/disk", "rb") as file:
        assert os.fstat(file.fileno()).st_size == 1 << 40
        file.seek((1 << 39) - 5)
        assert file.read(20) == bytes(5) + b"in the middle" + bytes(2)


def test_equal_files_are_stored_once(tmp_path: Path, importer: Importer) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    content = os.urandom(1 << 20)
    for number in range(8):
        (tree / str(number)).write_bytes(content)
    size = importer.run_blocking(ImportRequest(PathSource(tree))).size_bytes
    assert size < 1.1 * (1 << 20)


def test_fifty_thousand_entries_survive(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    """(I16)"""
    tree = tmp_path / "tree"
    for number in range(50):
        folder = tree / f"d{number}"
        folder.mkdir(parents=True)
        for other in range(1000):
            os.mknod(folder / f"f{other}", stat.S_IFREG | 0o644)
    layers = importer.run_blocking(ImportRequest(PathSource(tree))).layers
    assert store.manifest(layers[0]).entries == 50_051
    with mounted(store, layers) as root:
        assert len(manifest(root)) == 50_050


def test_a_path_longer_than_one_call_takes_survives(tmp_path: Path, importer: Importer) -> None:
    archive = tmp_path / "deep.tar"
    folders = [chr(ord("a") + number) * 250 for number in range(20)]
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for depth in range(1, len(folders) + 1):
            folder = tarfile.TarInfo("/".join(folders[:depth]))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        file = tarfile.TarInfo("/".join([*folders, "file"]))
        file.size = 100_000
        tar.addfile(file, io.BytesIO(os.urandom(file.size)))
    assert importer.run_blocking(ImportRequest(PathSource(archive))).size_bytes > 100_000


def test_what_is_mounted_in_a_directory_is_not_part_of_it(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    tree = tmp_path / "tree"
    (tree / "proc").mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "none", tree / "proc"], check=True)
    try:
        (tree / "proc" / "x").write_bytes(b"x")
        layers = importer.run_blocking(ImportRequest(PathSource(tree))).layers
    finally:
        subprocess.run(["umount", tree / "proc"], check=True)
    with mounted(store, layers) as root:
        assert list(manifest(root)) == [b"proc"]


def test_sockets_are_kept(tmp_path: Path, importer: Importer, store: FolderStore) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tree / "s"))
        layers = importer.run_blocking(ImportRequest(PathSource(tree))).layers
    with mounted(store, layers) as root:
        assert manifest(root) == manifest(tree)


def _exported(store: FolderStore, layers: list[str], path: Path) -> Path:
    with path.open("w+b") as out:
        write_archive(
            out, layers, ImageConfig(), name=ImageName("x"), tick=lambda done: None,
            opened=lambda digest: opened_layer(store, digest, path.parent, tick=lambda done: None),
        )  # fmt: skip
    return path


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(tree=st.dictionaries(NAMES, TREES, max_size=8), seed=st.integers(0, 2**32))
def test_an_exported_tree_is_the_same_tree(tree: dict[bytes, object], seed: int) -> None:
    """(I16) Links, devices, owners and attributes; sockets alone are left out."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "tree")
        Builder(seed).build(os.fsencode(source), tree)
        for at, _, names in os.walk(os.fsencode(source)):
            for name in names:
                if stat.S_ISSOCK(os.lstat(os.path.join(at, name)).st_mode):
                    os.unlink(os.path.join(at, name))
        store = FolderStore(Path(scratch, "store"))
        importer = Importer(store)
        made = importer.run_blocking(ImportRequest(PathSource(source)))
        archive = _exported(store, made.layers, Path(scratch, "out.tar"))
        again = importer.run_blocking(ImportRequest(PathSource(archive, form="image")))
        importer.close()
        with mounted(store, made.layers) as ours, mounted(store, again.layers) as back:
            assert manifest(back) == manifest(ours)


def test_the_holes_of_an_exported_file_take_no_room(
    tmp_path: Path, importer: Importer, store: FolderStore
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with open(tree / "holes", "wb") as file:
        file.truncate(3 << 30)
        file.seek(1 << 30)
        file.write(b"data in the middle")
    made = importer.run_blocking(ImportRequest(PathSource(tree)))
    archive = _exported(store, made.layers, tmp_path / "out.tar")
    assert archive.stat().st_size < 4 << 20
    again = importer.run_blocking(ImportRequest(PathSource(archive)))
    assert again.layers == made.layers
    with tarfile.open(archive) as whole:
        layer = max(whole.getmembers(), key=lambda one: one.size)
        data = whole.extractfile(layer)
        assert data is not None
        listed = subprocess.run(["tar", "-tv"], input=data.read(), capture_output=True, check=True)
    assert f" {3 << 30} ".encode() in listed.stdout
    assert b" holes" in listed.stdout or b"/holes" in listed.stdout
