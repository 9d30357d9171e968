"""The EROFS on-disk format: a tree and its data placement to the bytes of a metadata image.

Owns: super block, device table, inodes, directories, xattrs, chunk indexes. Does
not own: file contents (another device, :mod:`shared.erofs.writer` writes it).
Pure and deterministic: the same tree and placement give the same bytes. The
format is the kernel's ``fs/erofs/erofs_fs.h``; every inode is of the extended
kind, which carries its own mtime and 32-bit owners.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.erofs.layertree import OPAQUE_XATTR, Inode, walk
from shared.errors import Unsupported

BLOCK_BITS = 12
BLOCK_BYTES = 1 << BLOCK_BITS
SUPER_OFFSET = 1024
SUPER_BYTES = 128
DEVICE_SLOT_BYTES = 128
INODE_BYTES = 64
NID_BYTES = 32
DIRENT = struct.Struct("<QHBx")
HOLE = 0xFFFFFFFF
DATA_DEVICE = 1

MAGIC = 0xE0F5E1E2
COMPAT_CHECKSUM, COMPAT_MTIME = 0x1, 0x2
INCOMPAT_CHUNKED, INCOMPAT_DEVICE_TABLE = 0x4, 0x8
FLAT_PLAIN, FLAT_INLINE, CHUNK_BASED = 0, 2, 4
EXTENDED = 1
CHUNK_INDEXES = 0x20

XATTR_HEADER_BYTES = 12
XATTR_VALUE_MAX_BYTES = 65535
XATTR_PREFIXES = (
    (b"user.", 1),
    (b"system.posix_acl_access", 2),
    (b"system.posix_acl_default", 3),
    (b"trusted.", 4),
    (b"security.", 6),
)
FILE_TYPES = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4,
    stat.S_IFIFO: 5, stat.S_IFSOCK: 6, stat.S_IFLNK: 7,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a regular file's bytes are: ``inline`` here, or ``chunks`` of the data device.

    ``chunks`` holds one block number (or :data:`HOLE`) per ``1 << chunk_bits`` bytes.
    """

    inline: bytes = b""
    chunk_bits: int = BLOCK_BITS
    chunks: tuple[int, ...] = ()


@dataclass(slots=True)
class _Record:
    """An inode on its way to the image."""

    inode: Inode
    parent: _Record | None
    number: int
    layout: int = FLAT_PLAIN
    size: int = 0
    xattrs: bytes = b""
    chunk_format: int = 0
    chunks: bytes = b""
    blocks: bytes = b""  # whole blocks of a directory or link, away from the inode
    tail: bytes = b""  # what follows the inode itself
    at: int = 0
    block: int = 0
    links: int = 0
    names: dict[bytes, _Record] = field(default_factory=dict)

    @property
    def nid(self) -> int:
        return self.at // NID_BYTES


def encode(
    root: Inode, placements: dict[int, Placement], *, data_blocks: int, data_tag: bytes
) -> bytes:
    """The metadata image of ``root``; ``placements`` is keyed by ``id(inode)``.

    ``data_tag`` (64 bytes) names the data device, so that the image's digest
    covers the data. Raises :class:`Unsupported` where a value does not fit.
    """
    records = _records(root, placements)
    slots = 1 if data_blocks else 0
    end = _place(records, SUPER_OFFSET + SUPER_BYTES + slots * DEVICE_SLOT_BYTES)
    for record in records:
        if record.inode.is_dir:  # sizes were known before; now the numbers are
            _fill_directory(record)
    image = bytearray(end)
    for record in records:
        _write(image, record)
    if slots:
        slot = struct.pack("<64sII56x", data_tag, data_blocks, 0)
        at = SUPER_OFFSET + SUPER_BYTES
        image[at : at + DEVICE_SLOT_BYTES] = slot
    _write_super(image, records, slots)
    return bytes(image)


def _records(root: Inode, placements: dict[int, Placement]) -> list[_Record]:
    """One record per inode in canonical order, with links counted and sizes known."""
    by_inode: dict[int, _Record] = {}
    by_path: dict[bytes, _Record] = {}
    records: list[_Record] = []
    for path, inode in walk(root):
        parent_path, _, name = path.rpartition(b"/")
        parent = by_path[parent_path] if path else None
        record = by_inode.get(id(inode))
        if record is None:
            record = by_inode[id(inode)] = _Record(inode, parent, len(records) + 1)
            records.append(record)
        record.links += 1
        if inode.is_dir:
            by_path[path] = record
            record.links += 1  # its own "."
            if parent is not None:
                parent.links += 1  # ".."
        if parent is not None:
            parent.names[name] = record
    for record in records:
        _shape(record, placements)
    return records


def _shape(record: _Record, placements: dict[int, Placement]) -> None:
    """Choose the layout of an inode; all sizes are final afterwards."""
    inode = record.inode
    record.xattrs = encode_xattrs(inode)
    if inode.is_dir:
        _flat(record, bytes(_directory_bytes(record)))
    elif inode.is_link:
        _flat(record, inode.target)
    elif inode.is_regular:
        record.size = inode.size
        placed = placements[id(inode)]
        if placed.chunks:
            record.layout = CHUNK_BASED
            record.chunk_format = CHUNK_INDEXES | (placed.chunk_bits - BLOCK_BITS)
            record.chunks = b"".join(
                struct.pack("<HHI", 0, 0 if block == HOLE else DATA_DEVICE, block)
                for block in placed.chunks
            )
        else:
            _flat(record, placed.inline)


def _flat(record: _Record, data: bytes) -> None:
    """Lay ``data`` out beside its inode as far as one block allows, else in blocks."""
    record.size = len(data)
    tail = len(data) % BLOCK_BYTES
    inline = 0 < tail <= BLOCK_BYTES - INODE_BYTES - len(record.xattrs)
    cut = len(data) - tail if inline else len(data)
    record.layout = FLAT_INLINE if inline else FLAT_PLAIN
    record.blocks, record.tail = data[:cut], data[cut:]


def encode_xattrs(inode: Inode) -> bytes:
    """The inline xattr body: header, then entries in name order."""
    pairs = dict(inode.xattrs)
    if inode.opaque:
        pairs[OPAQUE_XATTR] = b"y"
    if not pairs:
        return b""
    body = bytearray(XATTR_HEADER_BYTES)
    for name, value in sorted(pairs.items()):
        index, suffix = _xattr_index(name)
        if len(suffix) > 255 or len(value) > XATTR_VALUE_MAX_BYTES:
            raise Unsupported(f"extended attribute {name[:80]!r} of {len(value)} bytes")
        body += struct.pack("<BBH", len(suffix), index, len(value)) + suffix + value
        body += bytes(-len(body) % 4)
    if (len(body) - XATTR_HEADER_BYTES) // 4 + 1 > 0xFFFF:
        raise Unsupported(f"{len(body)} bytes of extended attributes on one file")
    return bytes(body)


def _xattr_index(name: bytes) -> tuple[int, bytes]:
    for prefix, index in XATTR_PREFIXES:
        if name.startswith(prefix) and (prefix.endswith(b".") or name == prefix):
            return index, name[len(prefix) :]
    raise Unsupported(f"extended attribute of an unknown name space: {name[:80]!r}")


def _directory_blocks(record: _Record) -> Iterator[list[tuple[bytes, _Record]]]:
    """A directory's entries, those of a block together."""
    entries = dict(record.names)
    entries[b"."] = record
    entries[b".."] = record.parent or record
    block: list[tuple[bytes, _Record]] = []
    used = 0
    for name in sorted(entries):
        need = DIRENT.size + len(name)
        if used + need > BLOCK_BYTES:
            yield block
            block, used = [], 0
        block.append((name, entries[name]))
        used += need
    yield block


def _directory_bytes(record: _Record) -> int:
    """The size of a directory's content, which needs no node numbers."""
    *full, last = _directory_blocks(record)
    return len(full) * BLOCK_BYTES + sum(DIRENT.size + len(name) for name, _ in last)


def _directory_block(entries: list[tuple[bytes, _Record]]) -> bytes:
    name_at = DIRENT.size * len(entries)
    head = bytearray()
    for name, child in entries:
        kind = FILE_TYPES[stat.S_IFMT(child.inode.mode)]
        head += DIRENT.pack(child.at // NID_BYTES, name_at, kind)
        name_at += len(name)
    return bytes(head) + b"".join(name for name, _ in entries)


def _fill_directory(record: _Record) -> None:
    *full, last = [_directory_block(block) for block in _directory_blocks(record)]
    data = b"".join([*(block.ljust(BLOCK_BYTES, b"\0") for block in full), last])
    cut = len(record.blocks)
    record.blocks, record.tail = data[:cut], data[cut:]


def _place(records: list[_Record], start: int) -> int:
    """Give every inode its place (the root first); returns the image's size in bytes."""
    at = _round_up(start, NID_BYTES)
    gap_at = gap_end = 0
    for record in records:
        fixed = INODE_BYTES + len(record.xattrs)
        need = _round_up(fixed, 8) + len(record.chunks) if record.chunks else fixed
        # A tail must lie in its inode's block; keeping inodes whole costs next to nothing.
        together = fixed + len(record.tail) if record.tail else min(need, BLOCK_BYTES)
        need += len(record.tail)
        if need <= gap_end - gap_at:
            record.at, gap_at = gap_at, _round_up(gap_at + need, NID_BYTES)
            continue
        if at % BLOCK_BYTES + together > BLOCK_BYTES and together <= BLOCK_BYTES:
            block_end = _round_up(at, BLOCK_BYTES)
            if block_end - at > gap_end - gap_at:
                gap_at, gap_end = at, block_end
            at = block_end
        record.at, at = at, _round_up(at + need, NID_BYTES)
    # fsck.erofs reads an xattr header behind every inode, also behind the last without any.
    block = _round_up(at + XATTR_HEADER_BYTES, BLOCK_BYTES) // BLOCK_BYTES
    for record in records:
        if record.blocks:
            record.block = block
            block += _round_up(len(record.blocks), BLOCK_BYTES) // BLOCK_BYTES
    if block >= HOLE:
        raise Unsupported("metadata of more than 16 TiB")
    return block * BLOCK_BYTES


def _write(image: bytearray, record: _Record) -> None:
    inode = record.inode
    icount = (len(record.xattrs) - XATTR_HEADER_BYTES) // 4 + 1 if record.xattrs else 0
    if record.layout == CHUNK_BASED:
        union = record.chunk_format
    elif inode.is_device:
        union = encode_device(inode.rdev)
    else:
        union = record.block
    seconds, nanoseconds = divmod(inode.mtime_ns, 1_000_000_000)
    packed = struct.pack(
        "<HHHxxQIIIIqII16x",
        record.layout << 1 | EXTENDED, icount, inode.mode, record.size, union,
        record.number, inode.uid, inode.gid, seconds, nanoseconds, record.links,
    )  # fmt: skip
    body = packed + record.xattrs
    if record.chunks:
        body += bytes(-len(body) % 8) + record.chunks
    body += record.tail
    image[record.at : record.at + len(body)] = body
    at = record.block * BLOCK_BYTES
    image[at : at + len(record.blocks)] = record.blocks


def encode_device(rdev: int) -> int:
    """A device number as the kernel's ``new_encode_dev`` writes it."""
    major, minor = os.major(rdev), os.minor(rdev)
    if major >= 1 << 12 or minor >= 1 << 20:
        raise Unsupported(f"device number {major}:{minor}")
    return minor & 0xFF | major << 8 | (minor & ~0xFF) << 12


def _write_super(image: bytearray, records: list[_Record], slots: int) -> None:
    incompat = INCOMPAT_CHUNKED | INCOMPAT_DEVICE_TABLE if slots else 0

    def pack(checksum: int, uuid: bytes) -> bytes:
        return struct.pack(
            "<IIIBBHQQIIII16s16sIHHHBBIQ24x",
            MAGIC, checksum, COMPAT_CHECKSUM | COMPAT_MTIME, BLOCK_BITS, 0,
            records[0].nid, len(records), 0, 0, len(image) // BLOCK_BYTES, 0, 0,
            uuid, b"", incompat, 0, slots,
            (SUPER_OFFSET + SUPER_BYTES) // DEVICE_SLOT_BYTES if slots else 0, 0, 0, 0, 0,
        )  # fmt: skip

    where = slice(SUPER_OFFSET, SUPER_OFFSET + SUPER_BYTES)
    image[where] = pack(0, bytes(16))
    # Overlay tells its layers apart by this id: it follows from the content.
    uuid = hashlib.sha256(image).digest()[:16]
    image[where] = pack(0, uuid)
    image[where] = pack(crc32c(bytes(image[SUPER_OFFSET:BLOCK_BYTES])), uuid)


def _crc_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC_TABLE = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C as the kernel computes it: seeded with ones, not inverted at the end."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
