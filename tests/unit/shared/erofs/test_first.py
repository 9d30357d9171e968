"""The chunks of a layer that hold the files that are read first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shared.blobs.layout import DATA_CHUNK_BYTES, FIRST_MAX, LayerFiles
from shared.erofs.dirlayer import DirectoryLayer
from shared.erofs.layertree import Inode
from shared.erofs.writer import build_layer


def built(
    tree: Path, out: Path, *names: bytes, together: Sequence[bytes] = ()
) -> tuple[LayerFiles, bytes]:
    out.mkdir()
    with DirectoryLayer(tree, entries_max=100) as layer:
        first = [layer.tree.root.children[name] for name in names]
        files = build_layer(
            layer.tree.root, out, verify=False, first=first,
            together=[layer.tree.root.children[name] for name in together],
        )  # fmt: skip
    assert files.data_path is not None
    return files, files.data_path.read_bytes()


def test_the_chunks_are_those_that_hold_the_content_in_order(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    sizes = {"a": 5 * DATA_CHUNK_BYTES + 1, "b": 3000, "c": 2 * DATA_CHUNK_BYTES, "small": 10}
    content = {name: os.urandom(size) for name, size in sizes.items()}
    for name, data in content.items():
        (tree / name).write_bytes(data)
    files, blob = built(tree, tmp_path / "out", b"c", b"small", b"b", b"c")
    starts = [number * DATA_CHUNK_BYTES for number in sorted(files.first)]
    held = b"".join(blob[start : start + DATA_CHUNK_BYTES] for start in starts)
    assert content["c"] in held and content["b"] in held
    assert len(files.first) == len(set(files.first)) <= 4
    assert blob.index(content["c"]) // DATA_CHUNK_BYTES == files.first[0]
    assert files.manifest().first == files.first


def test_the_hint_changes_nothing_of_the_layer_and_is_bounded(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "holes").open("wb") as file:
        for number in range(2 * FIRST_MAX):
            file.seek(number * DATA_CHUNK_BYTES * 2)
            file.write(b"%d" % number)
    plain, _ = built(tree, tmp_path / "plain")
    hinted, _ = built(tree, tmp_path / "hinted", b"holes")
    assert (plain.digest, plain.first) == (hinted.digest, ())
    assert 0 < len(hinted.first) <= FIRST_MAX


def test_files_of_other_layers_are_not_in_this_one(tmp_path: Path) -> None:
    tree, out = tmp_path / "tree", tmp_path / "out"
    tree.mkdir()
    out.mkdir()
    (tree / "a").write_bytes(os.urandom(5000))
    with DirectoryLayer(tree, entries_max=100) as layer:
        files = build_layer(layer.tree.root, out, verify=False, first=[Inode(0o100644, size=5000)])
    assert files.first == ()


def test_what_is_read_together_lies_together_at_the_beginning(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    content = {b"%02d" % number: os.urandom(DATA_CHUNK_BYTES // 2) for number in range(20)}
    for name, data in content.items():
        (tree / name.decode()).write_bytes(data)
    names = [b"17", b"03", b"11", b"17"]
    files, blob = built(tree, tmp_path / "out", *names, together=names)
    assert files.first == (0, 1)
    assert blob.startswith(content[b"17"] + content[b"03"] + content[b"11"] + content[b"00"])
    assert files.data_bytes == len(blob) == sum(map(len, content.values()))
