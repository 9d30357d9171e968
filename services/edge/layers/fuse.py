"""The kernel's FUSE protocol, as far as a folder of read-only files needs it. Pure.

Owns: byte layouts and constants. Does not own: descriptors, what is in the files. Only
what the kernel sends for such a folder is here; all else is answered with ENOSYS.
"""

from __future__ import annotations

import stat
import struct

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FLUSH = 1, 2, 3, 14, 15, 17, 18, 25
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
UNANSWERED = frozenset({FORGET, INTERRUPT, BATCH_FORGET})
NOTIFY_RESEND = 7

ROOT_NODE = 1
MAX_READ = 1024 * 1024
REQUEST_BYTES = 64 * 1024
"""Room for any request: the kernel asks for 8 KiB, and nothing is written."""
BACKGROUND_MAX, CONGESTED_AT = 256, 192
FOREVER_S = 365 * 86_400
"""Names and attributes never change, so the kernel may keep them."""
RESENT = 1 << 63
"""Set in the number of a request that is sent again."""

_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
HEADER_BYTES = _IN.size
_ASYNC_READ, _ASYNC_DIO, _PARALLEL_DIROPS = 1 << 0, 1 << 15, 1 << 18
_MAX_PAGES, _INIT_EXT = 1 << 22, 1 << 30
_PAGE = 4096
_KEEP_CACHE = 1 << 1


def request(data: bytes | memoryview) -> tuple[int, int, int, memoryview]:
    """Operation, number, node and body of a request."""
    length, operation, unique, node, *_ = _IN.unpack_from(data)
    return operation, unique, node, memoryview(data)[HEADER_BYTES:length]


def head(unique: int, length: int = 0, error: int = 0) -> bytes:
    """What goes before ``length`` bytes of answer; ``error`` is an errno or 0."""
    return _OUT.pack(_OUT.size + length, -error, unique)


def resend() -> bytes:
    """Asks the kernel to send again what was read and never answered."""
    return _OUT.pack(_OUT.size, NOTIFY_RESEND, 0)


def init_answer(body: memoryview) -> bytes:
    """Our side of the handshake; ``body`` is the kernel's."""
    _major, _minor, _readahead, offered = struct.unpack_from("<IIII", body)
    wanted = (_ASYNC_READ | _ASYNC_DIO | _PARALLEL_DIROPS | _MAX_PAGES) & offered
    answer = struct.pack(
        "<IIIIHHIIHH", 7, 40, MAX_READ, wanted | (_INIT_EXT & offered), BACKGROUND_MAX,
        CONGESTED_AT, _PAGE, 1, MAX_READ // _PAGE, 0,
    )  # fmt: skip
    return answer.ljust(64, b"\0")


def attributes(node: int, size: int) -> bytes:
    """Of the folder (:data:`ROOT_NODE`) or a file of ``size`` bytes."""
    mode = stat.S_IFDIR | 0o500 if node == ROOT_NODE else stat.S_IFREG | 0o400
    return _ATTR.pack(node, size, -(-size // 512), 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, _PAGE, 0)


def entry(node: int, size: int) -> bytes:
    """The answer to a look-up."""
    life = struct.pack("<QQQQII", node, 0, FOREVER_S, FOREVER_S, 0, 0)
    return life + attributes(node, size)


def attribute_answer(node: int, size: int) -> bytes:
    return struct.pack("<QII", FOREVER_S, 0, 0) + attributes(node, size)


def name_of(body: memoryview) -> str:
    """The name in a look-up."""
    return bytes(body).split(b"\0", 1)[0].decode(errors="replace")


def open_answer(handle: int) -> bytes:
    return struct.pack("<QIi", handle, _KEEP_CACHE, 0)


def read_range(body: memoryview) -> tuple[int, int]:
    """Offset and length of a read."""
    _handle, offset, length = struct.unpack_from("<QQI", body)
    return offset, length


def handle_of(body: memoryview) -> int:
    """The handle in a release."""
    return int(struct.unpack_from("<Q", body)[0])


def statfs_answer() -> bytes:
    return struct.pack("<QQQQQIIII24x", 0, 0, 0, 0, 0, _PAGE, 255, _PAGE, 0)
