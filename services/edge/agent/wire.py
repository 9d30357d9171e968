"""Frames and fields of the agent protocol (``guest/PROTOCOL.md``).

Owns: the byte format. Does not own: sockets, operations, meaning. Pure. A frame is
``u32 length, u8 type, u32 operation id, payload``; a payload is a row of fields
``u8 tag, u32 length, bytes``; all numbers are little-endian. The peer is untrusted:
every length is checked before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MAGIC = b"DSEC"
FRAME_BYTES_MAX = 16 * 1024 * 1024
FROM_AGENT_BYTES_MAX = 1024 * 1024  # its largest frames: DATA and LISTING
WINDOW_BYTES = 256 * 1024
CHUNK_BYTES = 128 * 1024

_HEAD = struct.Struct("<IBI")
_FIELD = struct.Struct("<BI")
_U64 = struct.Struct("<Q")
_NUMBER_BYTES = 13  # of a field with a number
_ROWS = [struct.Struct("<" + "BIQ" * count) for count in range(17)]
_SIZES = [(8,) * count for count in range(17)]


class Msg(IntEnum):
    HELLO = 1
    SETUP = 2
    EXEC = 3
    DATA = 4
    EOF = 5
    CREDIT = 6
    SIGNAL = 7
    KILL = 8
    LIST = 9
    ATTACH = 10
    ACK = 11
    FILE = 12
    RESIZE = 13
    DIAL = 14
    POLICY = 15
    PAUSE = 18
    RESUME = 19
    RESULT = 20
    ERROR = 21
    OK = 22
    LISTING = 23


class Tag(IntEnum):
    KEY = 1
    ARGV = 2
    SHELL = 3
    CWD = 4
    ENV = 5
    USER = 6
    TIMEOUT_NS = 7
    LIMIT = 8
    MERGE = 9
    STDIN = 10
    SESSION = 11
    ROWS = 12
    COLS = 13
    PORT = 14
    WAIT_NS = 15
    IDLE_NS = 16
    ACCEPT = 17
    FOP = 20
    PATH = 21
    DST = 22
    OFFSET = 23
    LENGTH = 24
    MODE = 25
    APPEND = 26
    RECURSIVE = 27
    PARENTS = 28
    SOURCE = 29
    SPARSE = 30
    TIME_NS = 31
    CODE = 40
    MESSAGE = 41
    FIELD = 42
    ERRNO = 43
    EXIT_CODE = 50
    SIGNAL_NO = 51
    TIMED_OUT = 52
    OOM = 53
    DROPPED_OUT = 54
    DROPPED_ERR = 55
    TOTAL_OUT = 56
    TOTAL_ERR = 57
    DURATION_NS = 58
    SESSION_FRESH = 59
    SESSION_ENDED = 60
    CHANGE = 68
    CONTENT = 69
    NAME = 70
    TYPE = 71
    SIZE = 72
    FMODE = 73
    UID = 74
    GID = 75
    MTIME_NS = 76
    TARGET = 77
    INO = 78
    NLINK = 79
    VERSION = 80
    GENERATION = 81
    NEXT_ID = 82
    V1_COUNT = 83
    HAS_V2 = 84
    HAS_OOM = 85
    HAS_LISTENER = 86
    OP_ID = 90
    STATE = 91
    TAKEN = 92
    BASE_OUT = 93
    BASE_ERR = 94
    CTIME_NS = 95
    FILTER = 100
    FILTER_ASK = 101
    OPEN_FILES = 102
    FILE_SIZE = 103
    HAS_ASK = 104
    PROFILE = 105


class FileOp(IntEnum):
    READ = 1
    WRITE = 2
    STAT = 3
    LIST = 4
    MKDIR = 5
    REMOVE = 6
    MOVE = 7
    PACK = 8
    UNPACK = 9
    WATCH = 10


STDIN, STDOUT, STDERR = 0, 1, 2


class ProtocolError(Exception):
    """The peer sent what the protocol does not allow."""


class Frame(NamedTuple):
    type: int
    op_id: int
    payload: bytes


def data_frame(op_id: int, stream: int, size: int) -> bytes:
    """What goes before the ``size`` bytes of a DATA frame."""
    return _HEAD.pack(size + 6, Msg.DATA, op_id) + bytes([stream])


def frame(type_: int, op_id: int, payload: bytes = b"") -> bytes:
    """One frame; raises ``ValueError`` above ``FRAME_BYTES_MAX``."""
    if len(payload) + 5 > FRAME_BYTES_MAX:
        raise ValueError(f"a frame holds at most {FRAME_BYTES_MAX} bytes")
    return _HEAD.pack(len(payload) + 5, type_, op_id) + payload


class FrameDecoder:
    """Cuts a byte stream into frames of at most ``most`` bytes; holds at most one
    partial frame."""

    def __init__(self, most: int = FRAME_BYTES_MAX) -> None:
        self._buffer = bytearray()
        self._most = most

    def feed(self, data: bytes | memoryview) -> list[Frame]:
        """The frames that are complete now. Raises :class:`ProtocolError`. ``data`` may
        be overwritten afterwards: only a frame that is not whole yet is copied twice."""
        buffer = self._buffer
        if not buffer:
            frames, at = self._cut(data)
            buffer += data[at:]
            return frames
        buffer += data
        frames, at = self._cut(buffer)
        if at:
            del buffer[:at]
        return frames

    def _cut(self, data: bytes | bytearray | memoryview) -> tuple[list[Frame], int]:
        """The whole frames at the beginning, and where they end."""
        frames: list[Frame] = []
        at, have = 0, len(data)
        with memoryview(data) as view:
            while have - at >= _HEAD.size:
                length, type_, op_id = _HEAD.unpack_from(view, at)
                if not 5 <= length <= self._most:
                    raise ProtocolError(f"frame of {length} bytes")
                if have - at - 4 < length:
                    break
                frames.append(Frame(type_, op_id, bytes(view[at + 9 : at + 4 + length])))
                at += 4 + length
            if 4 <= have - at < _HEAD.size:
                self._check_length(view[at : at + 4])
        return frames, at

    def _check_length(self, raw: memoryview) -> None:
        """So that a bad length is known as soon as it is there."""
        length = int.from_bytes(raw, "little")
        if not 5 <= length <= self._most:
            raise ProtocolError(f"frame of {length} bytes")


def field(tag: int, value: bytes | str | int) -> bytes:
    """One field; numbers are unsigned 64-bit, text is UTF-8 (lone surrogates are the
    raw bytes they stand for)."""
    if isinstance(value, str):
        raw = value.encode("utf-8", "surrogateescape")
    elif isinstance(value, int):
        raw = _U64.pack(value)
    else:
        raw = value
    return _FIELD.pack(tag, len(raw)) + raw


def parse_fields(payload: bytes) -> list[tuple[int, bytes]]:
    """(tag, value) in order; raises :class:`ProtocolError` when malformed."""
    found: list[tuple[int, bytes]] = []
    at, end = 0, len(payload)
    while at < end:
        if end - at < 5:
            raise ProtocolError("field cut off")
        tag, length = _FIELD.unpack_from(payload, at)
        at += 5 + length
        if at > end:
            raise ProtocolError("field longer than its payload")
        found.append((tag, payload[at - length : at]))
    return found


def field_end(data: bytes, at: int = 0) -> int | None:
    """Where the field at ``at`` ends; ``None`` while it is not all there."""
    if len(data) - at < 5:
        return None
    _, length = _FIELD.unpack_from(data, at)
    if length > FROM_AGENT_BYTES_MAX:
        raise ProtocolError("field longer than what an agent sends")
    end: int = at + 5 + length
    return end if end <= len(data) else None


def entries_end(data: bytes) -> int:
    """How much of ``data`` is whole entries, each ended by a field ``CONTENT``."""
    at = end = 0
    while (after := field_end(data, at)) is not None:
        end = after if data[at] == Tag.CONTENT else end
        at = after
    return end


def split_entries(payload: bytes) -> Iterator[Fields]:
    """Cuts a row of whole entries."""
    start = at = 0
    for tag, value in parse_fields(payload):
        at += 5 + len(value)
        if tag == Tag.CONTENT:
            yield Fields(payload[start:at])
            start = at


class Fields:
    """A parsed payload, last value of each tag."""

    __slots__ = ("_numbers", "_values")

    def __init__(self, payload: bytes) -> None:
        self._numbers = _all_numbers(payload)
        self._values = {} if self._numbers else dict(parse_fields(payload))

    def _raw(self, tag: int) -> bytes | None:
        number = self._numbers.get(tag)
        return self._values.get(tag) if number is None else _U64.pack(number)

    def __contains__(self, tag: int) -> bool:
        return tag in self._values or tag in self._numbers

    def number(self, tag: int, otherwise: int = 0) -> int:
        number = self._numbers.get(tag)
        if number is not None:
            return number
        raw = self._values.get(tag)
        return otherwise if raw is None else int.from_bytes(raw[:8], "little")

    def text(self, tag: int, otherwise: str = "") -> str:
        """Bytes that are not UTF-8 become lone surrogates (paths), see :func:`field`."""
        raw = self._raw(tag)
        return otherwise if raw is None else raw.decode("utf-8", "surrogateescape")

    def shown(self, tag: int, most: int) -> str:
        """Text to be shown: at most ``most`` characters, bytes that are not UTF-8 as U+FFFD."""
        raw = (self._raw(tag) or b"")[: 4 * most]
        return raw.decode("utf-8", "replace")[:most]


def _all_numbers(payload: bytes) -> dict[int, int]:
    """The fields of a payload whose fields all have 8 bytes, as a command's result has
    them, taken apart at once; nothing of any other."""
    count, rest = divmod(len(payload), _NUMBER_BYTES)
    if rest or count >= len(_ROWS):
        return {}
    row = _ROWS[count].unpack(payload)
    return dict(zip(row[::3], row[2::3], strict=True)) if row[1::3] == _SIZES[count] else {}


def split_records(payload: bytes, first: int) -> Iterator[Fields]:
    """Cuts a row of records that each begin with the tag ``first``."""
    start: int | None = None
    at = 0
    for tag, value in parse_fields(payload):
        if tag == first:
            if start is not None:
                yield Fields(payload[start:at])
            start = at
        at += 5 + len(value)
    if start is not None:
        yield Fields(payload[start:])
