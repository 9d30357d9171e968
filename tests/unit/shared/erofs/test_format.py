"""The encoder alone: sizes, order, limits."""

from __future__ import annotations

import os
import stat

import pytest

from shared.erofs.format import (
    BLOCK_BYTES,
    Placement,
    crc32c,
    encode,
    encode_device,
    encode_xattrs,
)
from shared.erofs.layertree import Inode, LayerTree
from shared.erofs.writer import chunk_bits
from shared.errors import Unsupported
from tests.unit.shared.erofs.test_layertree import directory, regular


def test_the_checksum_is_crc32c() -> None:
    """The published check value of CRC-32C, without its final inversion."""
    assert crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283


def test_device_numbers_are_encoded_as_the_kernel_does() -> None:

    assert encode_device(os.makedev(8, 1)) == 0x801
    assert encode_device(os.makedev(259, 0x12345)) == 0x12300000 | 259 << 8 | 0x45
    with pytest.raises(Unsupported):
        encode_device(os.makedev(1 << 12, 0))


@pytest.mark.parametrize("name", [b"security", b"user", b"system.nfs4_acl", b"lustre.x", b"x"])
def test_xattrs_of_unknown_name_spaces_are_refused(name: bytes) -> None:
    with pytest.raises(Unsupported, match="name space"):
        encode_xattrs(regular(xattrs={name: b""}))


def test_oversized_xattrs_are_refused() -> None:
    with pytest.raises(Unsupported):
        encode_xattrs(regular(xattrs={b"user.x": bytes(65536)}))
    many = {b"user.%d" % n: bytes(60000) for n in range(6)}
    with pytest.raises(Unsupported):
        encode_xattrs(regular(xattrs=many))


def test_the_order_of_entries_does_not_change_the_image() -> None:
    def image(names: list[bytes]) -> bytes:
        tree = LayerTree()
        made: dict[bytes, Inode] = {}
        for name in names:
            made[name] = regular(mtime_ns=len(name))
            tree.add(name, made[name])
        placements = {id(inode): Placement(inline=name) for name, inode in made.items()}
        for name, inode in made.items():
            inode.size = len(name)
        return encode(tree.root, placements, data_blocks=0, data_tag=b"")

    names = [b"b/c", b"a", b"b/a", b"z" * 200]
    first = image(names)
    assert first == image(names[::-1])
    assert len(first) % BLOCK_BYTES == 0


def test_a_full_directory_costs_little_more_than_its_names() -> None:
    tree = LayerTree()
    for number in range(2000):
        tree.add(b"d/%04d" % number, regular())
    empty = Placement()
    placements = {id(inode): empty for inode in tree.root.children[b"d"].children.values()}
    size = len(encode(tree.root, placements, data_blocks=0, data_tag=b""))
    assert size < 2000 * (64 + 12 + 4) * 1.1 + 2 * BLOCK_BYTES


@pytest.mark.parametrize(
    ("size", "sparse", "bits"),
    [(1, False, 12), (4096, False, 12), (4097, False, 13), (1 << 30, False, 30),
     ((1 << 30) + 1, False, 31), (1 << 20, True, 12), (1 << 40, True, 26)],
)  # fmt: skip
def test_chunks_fit_a_file(size: int, sparse: bool, bits: int) -> None:
    assert chunk_bits(size, sparse=sparse) == bits


def test_a_directory_has_the_usual_link_count() -> None:
    tree = LayerTree()
    tree.add(b"d/", directory())
    tree.add(b"d/e/", directory())
    assert stat.S_ISDIR(tree.root.mode)
    image = encode(tree.root, {}, data_blocks=0, data_tag=b"")
    root = image[1152:]  # the root comes first, right after the super block
    assert int.from_bytes(root[44:48], "little") == 3
