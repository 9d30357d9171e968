"""What a layer says: names, implicit parents, whiteouts, links."""

from __future__ import annotations

import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.erofs.layertree import (
    DEPTH_MAX,
    Inode,
    LayerTree,
    nested,
    owned_by,
    split_path,
    walk,
)
from shared.errors import DsecError, InvalidRequest, Unsupported


def regular(size: int = 0, **fields: object) -> Inode:
    return Inode(stat.S_IFREG | 0o644, size=size, **fields)  # type: ignore[arg-type]


def directory(mode: int = 0o755) -> Inode:
    return Inode(stat.S_IFDIR | mode)


def link(target: bytes) -> Inode:
    return Inode(stat.S_IFLNK | 0o777, target=target)


def paths(root: Inode) -> list[bytes]:
    return [path for path, _ in walk(root)]


@pytest.mark.parametrize("bad", [b"/etc/passwd", b"../x", b"a/../../x", b"a/..", b"a\0b"])
def test_names_that_leave_the_tree_are_refused(bad: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        LayerTree().add(bad, regular())
    assert caught.value.field == "archive"


@pytest.mark.parametrize("bad", [b"n" * 256, b"d/" * DEPTH_MAX + b"x"])
def test_names_that_no_file_system_holds_are_refused(bad: bytes) -> None:
    with pytest.raises(InvalidRequest):
        split_path(bad)


@given(st.lists(st.binary(max_size=6), max_size=6), st.binary(max_size=12))
def test_no_name_or_link_reaches_outside_or_breaks_the_tree(
    targets: list[bytes], path: bytes
) -> None:
    """(I16) Whatever an archive says ends as an entry of the tree or a typed refusal."""
    tree = LayerTree()
    for number, target in enumerate(targets):
        try:
            tree.add(b"l%d" % number, link(target))
            tree.add(b"l%d/%s" % (number, path), regular())
            tree.link(b"h%d" % number, path)
        except DsecError:
            continue
    for seen in paths(tree.root):
        assert not seen.startswith(b"/")
        assert b".." not in seen.split(b"/")


def test_a_path_through_a_link_ends_inside_the_tree() -> None:
    tree = LayerTree()
    tree.add(b"usr/lib/", directory())
    tree.add(b"lib", link(b"/usr/lib"))
    tree.add(b"up", link(b"../../../usr"))
    tree.add(b"lib/x", regular())
    tree.add(b"up/y", regular())
    assert b"usr/lib/x" in paths(tree.root)
    assert b"usr/y" in paths(tree.root)


def test_links_in_a_circle_are_refused() -> None:
    tree = LayerTree()
    tree.add(b"a", link(b"b"))
    tree.add(b"b", link(b"a"))
    with pytest.raises(InvalidRequest, match="links"):
        tree.add(b"a/x", regular())


def test_an_entry_below_a_file_is_refused() -> None:
    tree = LayerTree()
    tree.add(b"a", regular())
    with pytest.raises(InvalidRequest, match="below a file"):
        tree.add(b"a/b", regular())


def test_an_implicit_parent_takes_what_the_lower_layer_says_of_it() -> None:
    lower = LayerTree()
    lower.add(b"tmp/", directory(0o1777))
    upper = LayerTree(lower=lower.root)
    upper.add(b"tmp/x", regular())
    assert upper.root.children[b"tmp"].mode == stat.S_IFDIR | 0o1777
    assert upper.root.children[b"tmp"].implicit


def test_a_later_entry_of_a_directory_keeps_its_children() -> None:
    tree = LayerTree()
    tree.add(b"d/x", regular())
    tree.add(b"d/", directory(0o700))
    assert paths(tree.root) == [b"", b"d", b"d/x"]
    assert tree.root.children[b"d"].mode == stat.S_IFDIR | 0o700


@pytest.mark.parametrize("whiteout_first", [True, False])
def test_a_directory_beside_its_own_whiteout_becomes_opaque(whiteout_first: bool) -> None:
    tree = LayerTree()
    steps = [
        lambda: tree.add_oci(b".wh.d", regular()),
        lambda: tree.add_oci(b"d/", directory()),
    ]
    for step in steps if whiteout_first else reversed(steps):
        step()
    assert tree.root.children[b"d"].is_dir
    assert tree.root.children[b"d"].opaque


def test_oci_whiteout_names_become_overlay_whiteouts() -> None:
    tree = LayerTree()
    tree.add_oci(b"d/.wh.gone", regular())
    tree.add_oci(b"e/.wh..wh..opq", regular())
    tree.add_oci(b"e/kept", regular())
    tree.add_oci(b"d/.wh..wh.plnk", regular())
    assert tree.root.children[b"d"].children[b"gone"].is_whiteout
    assert set(tree.root.children[b"d"].children) == {b"gone"}
    assert tree.root.children[b"e"].opaque
    assert not tree.root.children[b"e"].children[b"kept"].is_whiteout


@pytest.mark.parametrize("bad", [b".wh.", b"d/.wh..", b".wh..."])
def test_malformed_whiteouts_are_refused(bad: bytes) -> None:
    with pytest.raises(InvalidRequest, match="whiteout"):
        LayerTree().add_oci(bad, regular())


def test_a_hard_link_finds_its_target_in_an_earlier_layer() -> None:
    """(I06) Never an empty file, never a crash."""
    lower = LayerTree()
    target = regular(4096)
    lower.add(b"a", target)
    upper = LayerTree(lower=lower.root)
    upper.link(b"b", b"a")
    assert upper.root.children[b"b"] is target


@pytest.mark.parametrize("goal", [b"missing", b"dir", b"gone"])
def test_a_hard_link_without_a_target_is_refused(goal: bytes) -> None:
    lower = LayerTree()
    lower.add(b"dir/x", regular())
    lower.add(b"gone", regular())
    upper = LayerTree(lower=lower.root)
    upper.whiteout(b"gone")
    with pytest.raises(InvalidRequest, match="hard link"):
        upper.link(b"b", goal)


def test_a_hard_link_into_what_an_opaque_directory_hides_is_refused() -> None:
    lower = LayerTree()
    lower.add(b"d/x", regular())
    upper = LayerTree(lower=lower.root)
    upper.make_opaque(b"d")
    with pytest.raises(InvalidRequest):
        upper.link(b"b", b"d/x")


@pytest.mark.parametrize("name", [b"redirect", b"metacopy", b"whiteout", b"verity"])
def test_overlay_attributes_from_outside_are_refused(name: bytes) -> None:
    with pytest.raises(Unsupported, match="overlay"):
        LayerTree().add(b"x", regular(xattrs={b"trusted.overlay." + name: b"/etc"}))


def test_only_the_opaque_mark_of_the_mount_mode_in_use_is_understood() -> None:
    """(I03)"""
    tree = LayerTree()
    made = directory()
    made.xattrs = {b"trusted.overlay.opaque": b"y", b"trusted.overlay.origin": b"\0"}
    tree.add(b"d", made)
    assert tree.root.children[b"d"].opaque
    assert tree.root.children[b"d"].xattrs == {}


@pytest.mark.parametrize("owner", [-1, 2**32 - 1, 2**40])
def test_an_owner_that_is_no_id_is_refused(owner: int) -> None:
    """(I17)"""
    with pytest.raises(Unsupported, match="valid id"):
        LayerTree().add(b"x", regular(uid=owner))


def test_a_prefix_keeps_the_modes_that_everyone_relies_on() -> None:
    tree = LayerTree()
    tree.add(b"f", regular())
    placed = nested(tree.root, "/var/tmp/task")
    assert paths(placed) == [b"", b"var", b"var/tmp", b"var/tmp/task", b"var/tmp/task/f"]
    assert stat.S_IMODE(placed.children[b"var"].children[b"tmp"].mode) == 0o1777
    with pytest.raises(InvalidRequest) as caught:
        nested(tree.root, "workspace")
    assert caught.value.field == "prefix"


def test_squash_gives_every_entry_one_owner() -> None:
    tree = LayerTree()
    tree.add(b"d/f", regular(uid=5, gid=6))
    owned_by(tree.root, 1000, 1001)
    assert {(inode.uid, inode.gid) for _, inode in walk(tree.root)} == {(1000, 1001)}


def test_what_takes_a_directory_s_place_is_seen_by_the_next_entry() -> None:
    tree = LayerTree()
    tree.add(b"a/b/one", regular())
    tree.add(b"a/b", link(b"/c"))
    tree.add(b"a/b/two", regular())
    assert paths(tree.root) == [b"", b"a", b"a/b", b"c", b"c/two"]
    tree.add(b"a", regular())
    with pytest.raises(InvalidRequest, match="below a file"):
        tree.add(b"a/b/three", regular())


def test_a_directory_that_comes_after_its_entries_is_their_own() -> None:
    tree = LayerTree()
    tree.add(b"a/one", regular())
    tree.add(b"a", directory(0o700))
    tree.make_opaque(b"a")
    tree.add(b"a/two", regular())
    assert tree.root.children[b"a"].mode == stat.S_IFDIR | 0o700
    assert tree.root.children[b"a"].opaque
    assert paths(tree.root) == [b"", b"a", b"a/one", b"a/two"]


def test_a_hard_link_in_a_directory_s_place_is_seen_by_the_next_entry() -> None:
    tree = LayerTree()
    tree.add(b"file", regular())
    tree.add(b"a/one", regular())
    tree.link(b"a", b"file")
    with pytest.raises(InvalidRequest, match="below a file"):
        tree.add(b"a/two", regular())
