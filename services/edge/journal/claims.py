"""Intents of commands that the journal does not have yet: slots of a mapped file.

Owns: that an intent outlives this process from the moment :meth:`Claims.put` returns.
Does not own: what is done about it (:mod:`execs`).

A store into a shared mapping is in the kernel's page cache at once: it survives the death
of the process, like a commit of the journal, and costs a microsecond instead of two
threads waking each other (docs/adr/0030). The file is written through when it is made, so
a full disk can't be in the way later.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import zlib
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

SLOTS = 8_192
"""Intents not committed yet: more wait for the journal."""
SLOT_BYTES = 1_024
_HEAD = struct.Struct("<26s26s32sdQH")
_CRC = struct.Struct("<IH")
BODY_BYTES = SLOT_BYTES - _CRC.size - _HEAD.size
"""Longest text of an operation that fits into its slot. A longer one is told to the
journal alone, a moment later."""


class Claim(msgspec.Struct, frozen=True):
    """An intent: sandbox, operation, hash of the request, seconds since the epoch, number
    in the sandbox's trajectory, record of it there."""

    uid: str
    op_id: str
    hash: bytes
    at: float
    seq: int = 0
    body: bytes = b""


class Claims:
    """The slots of ``path``, which is made where it is missing. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = SLOTS * SLOT_BYTES
            if os.fstat(descriptor).st_size != size:
                os.truncate(descriptor, 0)
                _fill(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._free = list(range(SLOTS - 1, -1, -1))

    def found(self) -> list[Claim]:
        """What an earlier process left, in no order."""
        starts = range(0, SLOTS * SLOT_BYTES, SLOT_BYTES)
        slots = (self._map[at : at + SLOT_BYTES] for at in starts)
        return [_claim(slot) for slot in slots if _is_whole(slot)]

    def clear(self) -> None:
        """Forgets what was found."""
        self._map[:] = bytes(SLOTS * SLOT_BYTES)

    def put(self, claim: Claim) -> int | None:
        """Keeps an intent; its slot, or ``None`` where there is none for it."""
        uid, op_id = claim.uid.encode(), claim.op_id.encode()
        if not self._free or (len(uid), len(op_id), len(claim.hash)) != (26, 26, 32):
            return None
        slot = self._free.pop()
        body = claim.body if len(claim.body) <= BODY_BYTES else b""
        head = _HEAD.pack(uid, op_id, claim.hash, claim.at, claim.seq, len(body))
        data = head + body
        start = slot * SLOT_BYTES
        framed = _CRC.pack(zlib.crc32(data), len(data)) + data
        self._map[start : start + len(framed)] = framed
        return slot

    def drop(self, slot: int) -> None:
        """The journal has it, or it is void."""
        start = slot * SLOT_BYTES
        self._map[start : start + _CRC.size] = bytes(_CRC.size)
        self._free.append(slot)

    def close(self) -> None:
        """What is in the slots stays."""
        self._map.close()


def _fill(descriptor: int, size: int) -> None:
    left = memoryview(bytes(size))
    while left:
        left = left[os.write(descriptor, left) :]


def _is_whole(slot: bytes) -> bool:
    crc, size = _CRC.unpack_from(slot)
    data = slot[_CRC.size : _CRC.size + size]
    return bool(size >= _HEAD.size and zlib.crc32(data) == crc)


def _claim(slot: bytes) -> Claim:
    uid, op_id, hash_, at, seq, size = _HEAD.unpack_from(slot, _CRC.size)
    start = _CRC.size + _HEAD.size
    return Claim(
        uid.decode("ascii", "replace"), op_id.decode("ascii", "replace"), hash_, at, seq,
        slot[start : start + size],
    )  # fmt: skip
