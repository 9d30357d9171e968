"""Layers from tars: headers, holes, damage."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.imagesvc.tarlayer import read_tar
from shared.erofs.layertree import Extent, LayerTree, walk
from shared.errors import DsecError, InvalidRequest, Unsupported
from tests.unit.services.imagesvc.tars import as_range, folder, hardlink, member, symlink, tar_bytes

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")


def read(data: bytes, tmp_path: Path, entries_max: int = 1000) -> LayerTree:
    return read_tar(as_range(data, tmp_path), entries_max=entries_max)


def test_all_kinds_of_entries_are_read(tmp_path: Path) -> None:
    tree = read(
        tar_bytes(
            [
                folder("./", 0o751),
                member("bin/su", b"x" * 700, mode=0o4755, uid=1516583083, gid=7),
                symlink("bin/l", "/absolute/is/fine"),
                hardlink("bin/h", "bin/su"),
                member("dev/null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
                member("dev/sda", type=tarfile.BLKTYPE, devmajor=8, devminor=0),
                member("pipe", type=tarfile.FIFOTYPE),
                member("name", b"1"),
                member("NAME", b"2"),
            ]
        ),
        tmp_path,
    )
    found = dict(walk(tree.root))
    assert found[b""].mode == stat.S_IFDIR | 0o751
    assert found[b"bin/su"].mode == stat.S_IFREG | 0o4755
    assert (found[b"bin/su"].uid, found[b"bin/su"].gid) == (1516583083, 7)
    assert found[b"bin/h"] is found[b"bin/su"]
    assert found[b"bin/l"].target == b"/absolute/is/fine"
    assert found[b"dev/null"].rdev == os.makedev(1, 3)
    assert stat.S_ISBLK(found[b"dev/sda"].mode)
    assert stat.S_ISFIFO(found[b"pipe"].mode)
    assert {b"name", b"NAME"} <= set(found)


def test_xattrs_and_nanoseconds_survive(tmp_path: Path) -> None:
    """(I04)"""
    tree = read(
        tar_bytes(
            [
                member(
                    "ping",
                    b"",
                    pax_headers={
                        "SCHILY.xattr.security.capability": CAPABILITY.decode(
                            "utf-8", "surrogateescape"
                        ),
                        "SCHILY.xattr.user.note": "größe",
                        "mtime": "1600000000.123456789",
                    },
                )
            ]
        ),
        tmp_path,
    )
    inode = tree.root.children[b"ping"]
    assert inode.xattrs == {b"security.capability": CAPABILITY, b"user.note": "größe".encode()}
    assert inode.mtime_ns == 1_600_000_000_123_456_789


def test_textual_acls_are_refused_and_named(tmp_path: Path) -> None:
    data = tar_bytes([member("f", b"", pax_headers={"SCHILY.acl.access": "user::rw-"})])
    with pytest.raises(Unsupported, match="ACL"):
        read(data, tmp_path)


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_holes_of_a_sparse_file_are_known(tmp_path: Path, form: str) -> None:
    source = tmp_path / "in"
    source.mkdir()
    with open(source / "f", "wb") as file:
        file.seek(1 << 20)
        file.write(b"x" * 4096)
        file.truncate(8 << 20)
    data = subprocess.run(
        ["tar", "-C", source, "--sparse", f"--format={form}", "-cf", "-", "f"],
        check=True, capture_output=True,
    ).stdout  # fmt: skip
    inode = read(data, tmp_path).root.children[b"f"]
    assert inode.size == 8 << 20
    assert [(e.offset, e.length) for e in inode.extents if e.length] == [(1 << 20, 4096)]
    assert inode.source is not None
    assert inode.source.pread(4096, inode.extents[0].source_offset) == b"x" * 4096


@pytest.mark.parametrize("name", ["/etc/passwd", "../out", "a/../../out", "./.."])
def test_names_that_leave_the_layer_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(tar_bytes([member(name, b"")]), tmp_path)
    assert caught.value.field == "archive"


def test_a_hard_link_out_of_the_layer_is_refused(tmp_path: Path) -> None:
    for target in ("/etc/shadow", "../../etc/shadow"):
        with pytest.raises(InvalidRequest):
            read(tar_bytes([hardlink("x", target)]), tmp_path)


def test_too_many_entries_are_refused(tmp_path: Path) -> None:
    data = tar_bytes([member(f"f{n}", b"") for n in range(5)])
    with pytest.raises(InvalidRequest, match="more than 4"):
        read(data, tmp_path, entries_max=4)


def test_a_tar_cut_anywhere_is_refused(tmp_path: Path) -> None:
    """(I16) Also exactly between two entries, where tar readers see nothing wrong."""
    whole = tar_bytes([member("a", b"1" * 600), member("b", b""), member("c", b"3" * 512)])
    end_of_entries = -(-len(whole.rstrip(b"\0")) // 512) * 512
    for length in range(0, end_of_entries + 1, 64):
        with pytest.raises(InvalidRequest):
            read(whole[:length], tmp_path)
    assert set(read(whole, tmp_path).root.children) == {b"a", b"b", b"c"}


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(at=st.integers(0, 4 * 512 - 1), byte=st.integers(0, 255))
def test_damage_is_a_typed_refusal_or_harmless(tmp_path: Path, at: int, byte: int) -> None:
    data = bytearray(tar_bytes([member("a", b"1" * 600), folder("d"), symlink("l", "t")]))
    data[at] = byte
    try:
        tree = read(bytes(data), tmp_path)
    except DsecError:
        return
    for _, inode in walk(tree.root):
        assert all(e.source_offset + e.length <= len(data) for e in inode.extents)


def test_impossible_sparse_maps_are_refused(tmp_path: Path) -> None:
    headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": "100",
        "GNU.sparse.numblocks": "2", "GNU.sparse.map": "50,10,20,10", "GNU.sparse.name": "f",
    }  # fmt: skip
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = member("f", b"x" * 20, pax_headers=headers)
        tar.addfile(info, io.BytesIO(b"x" * 20))
    with pytest.raises(InvalidRequest):
        read(out.getvalue(), tmp_path)


def test_contents_stay_where_they_are(tmp_path: Path) -> None:
    inode = read(tar_bytes([member("f", b"abc")]), tmp_path).root.children[b"f"]
    assert inode.extents == (Extent(0, 3, 512),)
