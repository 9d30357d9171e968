"""Headers of tars that are made to cost more than they are worth."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.imagesvc import tarheaders, tarlayer
from services.imagesvc.archive import TarMembers
from services.imagesvc.tarlayer import read_tar
from shared.errors import DsecError, InvalidRequest, Unsupported
from tests.unit.services.imagesvc.tars import as_range, member, tar_bytes

END = bytes(1024)


def header(kind: bytes, content: bytes) -> bytes:
    info = tarfile.TarInfo("header")
    info.type, info.size = kind, len(content)
    return info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)


def refused(data: bytes, tmp_path: Path) -> DsecError:
    source = as_range(data, tmp_path)
    with pytest.raises(DsecError) as told:
        read_tar(source, entries_max=1000)
    with pytest.raises(type(told.value)):
        TarMembers.read(source)
    return told.value


@pytest.mark.parametrize("kind", [b"x", b"g", b"X", b"L", b"K"])
def test_a_header_is_bounded_before_it_is_read(kind: bytes, tmp_path: Path) -> None:
    large = bytes(tarheaders.HEADER_MAX_BYTES + 1)
    assert isinstance(refused(header(kind, large) + END, tmp_path), Unsupported)


@pytest.mark.parametrize(
    "content",
    [b"3 a", b"99 a=b\n", b"x a=b\n", b"0 a=b\n", b"5 =b\n", b"7 a=bcd", b"3 a" * 1000],
)
def test_records_that_do_not_follow_each_other_are_refused(
    content: bytes, tmp_path: Path
) -> None:
    assert isinstance(refused(header(b"x", content) + END, tmp_path), InvalidRequest)


def test_digits_cost_no_quadratic_search(tmp_path: Path) -> None:
    """One such header took the search for a character set minutes."""
    record = b"100010 a=" + b"1" * 100_000 + b"\n"
    assert isinstance(refused(header(b"x", record) + END, tmp_path), Unsupported)


def test_global_headers_are_bounded_together(tmp_path: Path) -> None:
    one = b"60010 a=" + b"v" * (60010 - 9) + b"\n"
    assert isinstance(refused(header(b"g", one) * 3 + END, tmp_path), Unsupported)


def test_a_sparse_map_has_lines(tmp_path: Path) -> None:
    records = b"22 GNU.sparse.major=1\n22 GNU.sparse.minor=0\n"
    file = member("sparse", b"1" * 100_000)
    data = header(b"x", records) + tar_bytes([file])
    assert isinstance(refused(data, tmp_path), InvalidRequest)


def test_the_longest_xattr_is_read(tmp_path: Path) -> None:
    file = member("a", b"", pax_headers={"SCHILY.xattr.user.long": "x" * 65535})
    tree = read_tar(as_range(tar_bytes([file]), tmp_path), entries_max=10)
    (entry,) = tree.root.children.values()
    assert entry.xattrs == {b"user.long": b"x" * 65535}


def test_the_xattrs_of_a_layer_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tarlayer, "XATTRS_MAX_BYTES", 1000)
    record = b"518 SCHILY.xattr.user.a=" + b"v" * (518 - 25) + b"\n"
    data = header(b"g", record) + tar_bytes([member(name, b"") for name in "abc"])
    with pytest.raises(Unsupported):
        read_tar(as_range(data, tmp_path), entries_max=10)


READ = ("name", "mode", "uid", "gid", "size", "mtime", "type", "linkname", "devmajor", "devminor")
KINDS = [tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE, tarfile.CHRTYPE]
FORMATS = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT]


def values(read: type[tarfile.TarInfo], block: bytes) -> list[object]:
    found = read.frombuf(block, "utf-8", "surrogateescape")
    return [getattr(found, name) for name in READ]


@given(
    name=st.text("ab/\xe9", min_size=1, max_size=120), kind=st.sampled_from(KINDS),
    form=st.sampled_from(FORMATS), mode=st.integers(0, 0o7777), owner=st.integers(0, 1 << 30),
    size=st.integers(0, 1 << 40), mtime=st.integers(-9, 1 << 40), minor=st.integers(0, 9),
)  # fmt: skip
def test_plain_headers_say_what_the_library_reads_in_them(
    name: str, kind: bytes, form: int, mode: int, owner: int, size: int, mtime: int, minor: int
) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.uid, info.gid = kind, mode, owner, owner // 2
    info.size, info.mtime, info.devminor, info.linkname = size, mtime, minor, name[:90]
    try:
        block = info.tobuf(form)[-512:]
    except ValueError:  # ustar has no room for it
        assume(False)
    assert values(tarheaders.BoundedTar.tarinfo, block) == values(tarfile.TarInfo, block)


@pytest.mark.parametrize("at", [0, 100, 124, 147, 148, 154, 156, 329, 345, 511])
def test_a_header_with_another_byte_is_refused(at: int) -> None:
    block = bytearray(tarfile.TarInfo("name").tobuf(tarfile.USTAR_FORMAT))
    block[at] ^= 1
    with pytest.raises(tarfile.HeaderError):
        tarheaders.BoundedTar.tarinfo.frombuf(block, "utf-8", "surrogateescape")
