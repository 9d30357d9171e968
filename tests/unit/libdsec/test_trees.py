"""Names from a sandbox stay inside their root; local trees are walked once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec import InvalidRequest, NotARegularFile
from libdsec._bundle import Entry, Unbundler, pack
from libdsec._local import Place, Taken, scan
from libdsec._treeplan import (
    BUNDLE_BYTES,
    BUNDLE_FILES,
    NAMES_BYTES,
    Item,
    batches,
    inside,
    leads_outside,
    left_out,
    remote_items,
    same,
)
from libdsec.errors import InternalError
from libdsec.results import FileInfo

PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "root"]), max_size=6)


@given(PARTS, st.booleans())
def test_no_name_leads_out(parts: list[str], absolute: bool) -> None:
    path = ("/" if absolute else "") + "/".join(parts)
    try:
        name = inside("/root", path)
    except InvalidRequest:
        return
    resolved = Path("/root", name).resolve()
    assert resolved.is_relative_to("/root")
    assert resolved != Path("/root")


@pytest.mark.parametrize(
    ("root", "path", "name"),
    [("/w", "/w/a/b", "a/b"), ("w", "w/a", "a"), ("/w/", "/w/a", "a"), ("/", "/a", "a")],
)
def test_names_are_relative(root: str, path: str, name: str) -> None:
    assert inside(root, path) == name


def test_links_are_not_walked(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("x")
    (tmp_path / "d" / "up").symlink_to("..")
    found = [(item.kind, item.name) for item in scan(tmp_path, ())]
    assert found == [("d", "d"), ("f", "d/f"), ("l", "d/up")]
    with pytest.raises(InvalidRequest):
        scan(tmp_path / "d" / "f", ())


@pytest.mark.parametrize(
    ("pattern", "out"),
    [
        ("*.pyc", ["a/b.pyc", "x.pyc"]),
        ("a", ["a", "a/b.pyc", "a/c", "a/c/d"]),
        ("a/c", ["a/c", "a/c/d"]),
        ("/x.*", ["x.pyc"]),
        ("c/", ["a/c", "a/c/d"]),
        ("*/d", []),
        ("*/c", ["a/c", "a/c/d"]),
        ("c/d", []),
    ],
)
def test_patterns_leave_out_names_and_what_is_below(pattern: str, out: list[str]) -> None:
    names = ["a", "a/b.pyc", "a/c", "a/c/d", "x.pyc", "y", "y/x.z"]
    assert [n for n in names if left_out(n, [pattern])] == out


@pytest.mark.parametrize(
    ("name", "target", "outside"),
    [
        ("l", "f", False), ("d/l", "../f", False), ("d/l", "../../f", True), ("l", "..", True),
        ("l", "/etc", True), ("d/l", "e/../../f", False), ("l", "d/../../d", True),
        ("d/l", "./.././..", True), ("l", "d//f", False),
    ],
)  # fmt: skip
def test_a_link_leads_outside_or_not(name: str, target: str, outside: bool) -> None:
    assert leads_outside(name, target) is outside


INFO = FileInfo("/r/f", "file", 1, 0o644, 0, 0, 1.0)


def test_a_listing_becomes_items_and_several_names_links() -> None:
    second = FileInfo("/r/g", "file", 1, 0o644, 0, 0, 1.0, ino=7, nlink=2)
    first = FileInfo("/r/d/e", "file", 1, 0o644, 0, 0, 1.0, ino=7, nlink=2)
    items = remote_items("/r", [first, INFO, second], ())
    assert [(i.kind, i.name, i.target) for i in items] == [
        ("f", "d/e", ""), ("f", "f", ""), ("h", "g", "d/e"),
    ]  # fmt: skip
    for type_ in ("fifo", "socket", "chr", "blk"):
        with pytest.raises(NotARegularFile, match="/r/p"):
            remote_items("/r", [FileInfo("/r/p", type_, 0, 0, 0, 0, 0.0)], ())
    with pytest.raises(InvalidRequest):
        remote_items("/r", [FileInfo("/r/../x", "file", 0, 0, 0, 0, 0.0)], ())


def test_what_is_the_same_is_told_from_what_is_not() -> None:
    item = Item("f", "f", 3, 0o644, 1_700_000_000_123_456_789)
    coarse = 1_700_000_000_123_456_000
    assert same(item, Item("f", "f", 3, 0o644, coarse))
    for other in (
        None, Item("f", "f", 4, 0o644, coarse), Item("f", "f", 3, 0o600, coarse),
        Item("f", "f", 3, 0o644, coarse + 2000), Item("f", "l", 3, 0o644, coarse),
    ):  # fmt: skip
        assert not same(item, other)


@given(st.lists(st.tuples(st.integers(0, 300_000), st.integers(1, 4000)), max_size=1200))
def test_bundles_stay_within_their_bounds(files: list[tuple[int, int]]) -> None:
    items = [Item("x" * length, "f", size) for size, length in files]
    made = list(batches(items))
    assert [i for batch in made for i in batch] == items
    for batch in made:
        assert 0 < len(batch) <= BUNDLE_FILES
        assert sum(len(i.name) + 1 for i in batch) <= NAMES_BYTES
        assert len(batch) == 1 or sum(i.size for i in batch) <= BUNDLE_BYTES


ENTRIES = st.builds(
    Entry, st.sampled_from("fdlh"), st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    st.integers(0, 0o7777), st.integers(0, 1 << 62), st.text("ab/.", max_size=5), st.binary(),
)  # fmt: skip


@given(st.lists(ENTRIES, max_size=8), st.lists(st.integers(0, 400), max_size=8))
def test_a_bundle_comes_back_however_it_is_cut(entries: list[Entry], cuts: list[int]) -> None:
    data, parser, found = b"".join(map(pack, entries)), Unbundler(), []
    at = 0
    for cut in (*sorted(cuts), len(data)):
        found += parser.feed(data[at:cut])
        at = max(at, min(cut, len(data)))
    parser.close()
    assert found == entries


def test_a_bundle_that_is_none_is_an_error() -> None:
    with pytest.raises(InternalError):
        Unbundler().feed(b"\x45\xff\xff\xff\xff")
    parser = Unbundler()
    parser.feed(pack(Entry("f", "x"))[:-1])
    with pytest.raises(InternalError):
        parser.close()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "away").symlink_to(outside)
    (root / "file").symlink_to(outside / "file")
    with pytest.raises(InvalidRequest):
        Place(root).write([Entry("f", "away/x", content=b"x")])
    Place(root).write([Entry("f", "file", 0o600, content=b"x")])
    assert not (root / "file").is_symlink() and list(outside.iterdir()) == []


def test_progress_is_taken_back_for_what_begins_again() -> None:
    counts: list[int] = []
    whole = Taken(counts.append)
    one, two = whole.part(), whole.part()
    one(5), two(7), one(1)
    one.back()
    assert counts == [5, 7, 1, -6]
