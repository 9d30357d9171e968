"""How much a sandbox may write, and what bounds it on this node. Pure.

Owns: which limits are possible, the size of a file system that leaves just that much,
which mechanism a node uses. Does not own: looking at the node, making anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from shared.errors import InvalidRequest

MIB: Final = 1 << 20
BLOCK: Final = 4096
INODE: Final = 256
GROUP_BYTES: Final = 32_768 * BLOCK
"""ext4's own: what one bitmap of a block covers."""
INODES_STEP: Final = 16
"""Inodes of a block: a group has a multiple of it."""
OWN_INODES: Final = 16
"""Taken before the sandbox writes: ext4's reserved ones, the folders of the overlay."""
DISK_MB_MIN: Final = 8
"""Under it the folders of a root and their mount points may not fit."""
INODES_MIN: Final = 64
BYTES_PER_INODE: Final = 8192
"""Where only bytes are limited; twice as many as a file system commonly has."""
FULL_SHARE: Final = 0.98

Mechanism = Literal["quota", "image"]
CHOICES: Final = ("auto", "quota", "image", "none")


@dataclass(frozen=True, slots=True)
class Room:
    """What one sandbox may write: MiB and files."""

    disk_mb: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Found:
    """Whether a mechanism works here; why not."""

    works: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes that are taken; whether hardly any, or no inode, is left."""

    used_bytes: int = 0
    full: bool = False


def room_for(disk_mb: int | None, inodes: int | None) -> Room | None:
    """The limits of a start, ``None`` where there are none. Raises ``InvalidRequest``
    naming the limit that is impossible."""
    if disk_mb is None:
        if inodes is None:
            return None
        text = "files are limited together with their bytes: set disk_limit_mb too"
        raise InvalidRequest(text, field="policy.resources.inodes")
    if disk_mb < DISK_MB_MIN:
        text = f"{disk_mb} MiB: a container's disk has at least {DISK_MB_MIN} MiB"
        raise InvalidRequest(text, field="disk_limit_mb", details={"least": DISK_MB_MIN})
    if inodes is None:
        return Room(disk_mb, max(1024, disk_mb * MIB // BYTES_PER_INODE))
    least = max(INODES_MIN, INODES_STEP * -(-disk_mb * MIB // GROUP_BYTES))
    if inodes < least:
        text = f"{inodes} files: a disk of {disk_mb} MiB has at least {least}"
        raise InvalidRequest(text, field="policy.resources.inodes", details={"least": least})
    return Room(disk_mb, inodes)


def image_bytes(room: Room) -> int:
    """Size of an ext4 file system in which ``room.disk_mb`` are free: with its tables,
    and what ext4 keeps back (2 %, 16 MiB at most)."""
    payload, size = room.disk_mb * MIB, 0
    for _ in range(2):  # the tables of the tables' own groups
        groups = -(-max(size, payload) // GROUP_BYTES)
        tables = groups * (-(-image_inodes(room) * INODE // groups) + 3 * BLOCK)
        descriptors = 8 * BLOCK * (1 + groups * 64 // BLOCK)
        needed = payload + tables + descriptors + 16 * BLOCK
        size = needed + min(needed // 49, 4096 * BLOCK)
    return -(-size // BLOCK) * BLOCK


def image_inodes(room: Room) -> int:
    """Inodes to make it with."""
    return room.inodes + OWN_INODES


def use_of(*, blocks: int, free: int, available: int, unit: int, inodes_free: int) -> Use:
    """From what ``statvfs`` says of the file system."""
    spare = (1 - FULL_SHARE) * blocks
    return Use((blocks - free) * unit, available <= spare or inodes_free == 0)


def choose(wanted: str, *, quota: Found, image: Found) -> tuple[Mechanism | None, str]:
    """The mechanism, or ``None`` and why there is none. A quota costs a create nothing and
    keeps free room common, so it comes first. Raises ``InvalidRequest`` for no choice."""
    if wanted not in CHOICES:
        raise InvalidRequest(f"disks: one of {', '.join(CHOICES)}", field="disks")
    if wanted == "none":
        return None, "this node's operator limits no disks"
    if quota.works and wanted in ("auto", "quota"):
        return "quota", ""
    if image.works and wanted in ("auto", "image"):
        return "image", ""
    reasons = {"quota": quota.reason, "image": image.reason}
    told = [text for name, text in reasons.items() if wanted in ("auto", name)]
    return None, "; ".join(told)
