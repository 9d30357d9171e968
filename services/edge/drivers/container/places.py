"""What a start makes before its sandbox has a container: a folder with a disk in it.

Owns: making it, what the handle keeps of it, what a full disk means. Does not own: disks
(:mod:`services.edge.disks`), the shell that gets it, undoing a start (driver).
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.edge.disks.disks import Disk, Disks
from services.edge.drivers.base import StartSpec
from services.edge.drivers.container.folders import DISK
from services.edge.drivers.container.shells import WarmShell
from services.edge.drivers.container.wanted import room_of
from services.edge.layers.mounts import Upper
from shared.errors import CapacityExhausted, Conflict


@dataclass(slots=True)
class Place:
    """A sandbox's folder, as far as it is ``made``, and its disk."""

    folder: Path
    disk: Disk
    made: bool = False


def place_of(folder: Path) -> Place:
    """One of which nothing is made yet."""
    return Place(folder, Disk(Upper(folder), {}))


def make(place: Place, spec: StartSpec, disks: Disks) -> None:
    """Blocking. Raises ``Conflict`` where there is such a sandbox, ``OSError``; what was
    made is in ``place`` then, too."""
    try:
        place.folder.mkdir(mode=0o700)
    except FileExistsError:
        raise Conflict(f"sandbox {spec.uid} exists", field="uid") from None
    place.made = True
    place.disk = disks.make(place.folder, room_of(spec))


def data_of(warm: WarmShell, spec: StartSpec, disk: Disk) -> dict[str, Any]:
    """What a handle keeps."""
    captures = {"captures": list(spec.captures)} if spec.captures else {}
    limited = {DISK: dict(disk.note)} if disk.note else {}
    return {
        "container": warm.shell.id, "name": warm.shell.name, "pid": warm.shell.pid,
        "groups": warm.groups.data(), **captures, **limited,
    }  # fmt: skip


def full_disk(err: OSError) -> Exception:
    """The typed error of a disk that is full; any other as it is."""
    if err.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityExhausted("the node's disk is full", field="disk")
    return err
