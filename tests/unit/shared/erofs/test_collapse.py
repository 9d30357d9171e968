"""Which layers are merged and what stays hidden."""

from __future__ import annotations

import stat

from shared.erofs.collapse import Collapser
from shared.erofs.layertree import Extent, Inode, LayerTree, walk
from tests.unit.shared.erofs.test_layertree import directory, regular


def sized(length: int) -> Inode:
    return regular(length, extents=(Extent(0, length, 0),))


def names(root: Inode) -> set[bytes]:
    return {path for path, _ in walk(root)} - {b""}


def whiteouts(root: Inode) -> set[bytes]:
    return {path for path, inode in walk(root) if inode.is_whiteout}


def layer(collapser: Collapser) -> LayerTree:
    return LayerTree(lower=collapser.view)


def test_small_layers_become_one_without_whiteouts_or_dead_data() -> None:
    collapser = Collapser()
    first = layer(collapser)
    first.add(b"secret", sized(10))
    first.add(b"d/old", sized(10))
    collapser.add(first.root)
    second = layer(collapser)
    second.whiteout(b"secret")
    second.make_opaque(b"d")
    second.add(b"d/new", sized(1))
    collapser.add(second.root)
    (only,) = collapser.finish()
    assert names(only) == {b"d", b"d/new"}
    assert not only.children[b"d"].opaque


def test_a_layer_over_the_threshold_starts_another_and_keeps_what_it_hides() -> None:
    collapser = Collapser(threshold_bytes=15)
    first = layer(collapser)
    first.add(b"a", sized(10))
    first.add(b"d/old", regular())
    collapser.add(first.root)
    second = layer(collapser)
    second.add(b"b", sized(10))
    second.whiteout(b"a")
    second.whiteout(b"never-there")
    second.make_opaque(b"d")
    collapser.add(second.root)
    third = layer(collapser)
    third.whiteout(b"b")
    collapser.add(third.root)
    below, above = collapser.finish()
    assert names(below) == {b"a", b"d", b"d/old"}
    assert whiteouts(above) == {b"a"}
    assert names(above) == {b"a", b"d"}
    assert above.children[b"d"].opaque


def test_a_directory_in_place_of_a_hidden_one_stays_opaque() -> None:
    """Deleted in one layer, made anew in the next: both in one group over a third."""
    collapser = Collapser(threshold_bytes=15)
    first = layer(collapser)
    first.add(b"d/old", sized(10))
    collapser.add(first.root)
    second = layer(collapser)
    second.whiteout(b"d")
    second.add(b"big", sized(10))
    collapser.add(second.root)
    third = layer(collapser)
    third.add(b"d/new", regular())
    collapser.add(third.root)
    _, above = collapser.finish()
    assert above.children[b"d"].opaque
    assert names(above) == {b"big", b"d", b"d/new"}


def test_over_an_unknown_base_every_whiteout_stays() -> None:
    collapser = Collapser(below_unknown=True)
    only = layer(collapser)
    only.whiteout(b"usr/bin/gone")
    only.make_opaque(b"opt")
    only.whiteout(b"opt/useless")
    collapser.add(only.root)
    (kept,) = collapser.finish()
    assert whiteouts(kept) == {b"usr/bin/gone"}
    assert kept.children[b"opt"].opaque


def test_an_implicit_directory_does_not_change_the_one_below() -> None:
    collapser = Collapser()
    first = layer(collapser)
    first.add(b"d/", directory(0o700))
    collapser.add(first.root)
    second = layer(collapser)
    second.add(b"d/x", regular())
    collapser.add(second.root)
    (only,) = collapser.finish()
    assert only.children[b"d"].mode == stat.S_IFDIR | 0o700


def test_an_image_without_layers_is_one_empty_layer() -> None:
    (only,) = Collapser().finish()
    assert names(only) == set()
