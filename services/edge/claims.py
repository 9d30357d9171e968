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
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

SLOTS = 8_192
"""Intents not committed yet: more wait for the journal."""
_BODY = struct.Struct("<26s26s32sd")
_CRC = struct.Struct("<I")
_SIZE = _CRC.size + _BODY.size


@dataclass(frozen=True, slots=True)
class Claim:
    """An intent: sandbox, operation, hash of the request, seconds since the epoch."""

    uid: str
    op_id: str
    hash: bytes
    at: float


class Claims:
    """The slots of ``path``, which is made where it is missing. Raises ``OSError``."""

    def __init__(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = SLOTS * _SIZE
            if os.fstat(descriptor).st_size != size:
                os.truncate(descriptor, 0)
                _fill(descriptor, size)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self._free = list(range(SLOTS - 1, -1, -1))

    def found(self) -> list[Claim]:
        """What an earlier process left, in no order."""
        slots = (self._map[at : at + _SIZE] for at in range(0, SLOTS * _SIZE, _SIZE))
        return [_claim(slot) for slot in slots if _is_whole(slot)]

    def clear(self) -> None:
        """Forgets what was found."""
        self._map[:] = bytes(SLOTS * _SIZE)

    def put(self, claim: Claim) -> int | None:
        """Keeps an intent; its slot, or ``None`` where there is none for it."""
        uid, op_id = claim.uid.encode(), claim.op_id.encode()
        if not self._free or (len(uid), len(op_id), len(claim.hash)) != (26, 26, 32):
            return None
        slot = self._free.pop()
        body = _BODY.pack(uid, op_id, claim.hash, claim.at)
        self._map[slot * _SIZE : (slot + 1) * _SIZE] = _CRC.pack(zlib.crc32(body)) + body
        return slot

    def drop(self, slot: int) -> None:
        """The journal has it, or it is void."""
        self._map[slot * _SIZE : slot * _SIZE + _CRC.size] = bytes(_CRC.size)
        self._free.append(slot)

    def close(self) -> None:
        """What is in the slots stays."""
        self._map.close()


def _fill(descriptor: int, size: int) -> None:
    left = memoryview(bytes(size))
    while left:
        left = left[os.write(descriptor, left) :]


def _is_whole(slot: bytes) -> bool:
    crc: int = _CRC.unpack_from(slot)[0]
    return bool(crc) and zlib.crc32(slot[_CRC.size :]) == crc


def _claim(slot: bytes) -> Claim:
    uid, op_id, hash_, at = _BODY.unpack_from(slot, _CRC.size)
    return Claim(uid.decode("ascii", "replace"), op_id.decode("ascii", "replace"), hash_, at)
