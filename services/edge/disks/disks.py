"""Disks of sandboxes: where each writes, and how much.

Owns: the node's one mechanism, the way through it, whether sandboxes can write at all. Does
not own: limits that are possible (plan), the mechanisms (images, quotas). A sandbox without
a limit writes into its folder, and nothing here costs it anything. What is to be known of a
disk later is its note, which is kept with the sandbox.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.edge.disks.images import Images
from services.edge.disks.plan import Found, Mechanism, Room, Use, choose, use_of
from services.edge.disks.quotas import Quotas
from services.edge.layers import proof
from services.edge.layers.mounts import Upper
from shared.erofs.kernelmount import open_beneath
from shared.errors import Unsupported

log = logging.getLogger(__name__)

Note = Mapping[str, Any]
ENFORCERS = {"quota": "project quota", "image": "ext4 image"}
_INNER = "disk"
"""The folder with a project, in the sandbox's."""
ENTRIES_MAX = 200_000
"""Entries of an unlimited layer that are looked at to say how large it is."""


@dataclass(slots=True)
class Disk:
    """A disk that was just made; ``note`` is to be kept. :meth:`close` when its root is
    composed."""

    upper: Upper
    note: Note
    fd: int = -1

    @property
    def enforcement(self) -> dict[str, str]:
        """What bounds it."""
        if not self.note:
            return {}
        return {"disk_mb": ENFORCERS["image" if "loop" in self.note else "quota"]}

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Disks:
    """The disks of one driver. Blocking, thread-safe."""

    def __init__(self, folder: Path, wanted: str, *, kept: bool = True) -> None:
        """``folder``: on the file system of the sandboxes' folders. ``wanted``: a choice of
        plan. ``kept``: who limits a disk by a project keeps what is in a sandbox from
        changing a file's project, as root can; else there are no quotas here."""
        self._folder, self._wanted, self._kept = folder, wanted, kept
        self._images, self._quotas = Images(folder), Quotas(folder)
        self._proven = False
        self._found: tuple[Mechanism | None, str] = (None, "this node was not probed yet")

    def probe(self) -> Found:
        """Looks again where there was no mechanism. Tries what it says."""
        if self._found[0] is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            quota = self._quota() if self._wanted in ("auto", "quota") else Found(False)
            image = Found(False)
            if not quota.works and self._wanted in ("auto", "image"):
                image = self._images.probe()
            self._found = choose(self._wanted, quota=quota, image=image)
        mechanism, reason = self._found
        return Found(mechanism is not None, ENFORCERS.get(mechanism or "", reason))

    def _quota(self) -> Found:
        if not self._kept:
            return Found(False, "nothing keeps files in their project on this machine")
        return self._quotas.probe()

    def prove(self) -> str | None:
        """What overlay gets wrong here, ``None`` where nothing: tried until it is right."""
        if not self._proven:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            wrong = proof.prove(self._folder)
            self._proven = wrong is None
            return wrong
        return None

    def check(self, room: Room | None) -> None:
        """Raises ``Unsupported`` where the node cannot bound a disk."""
        mechanism, reason = self._found
        if room is not None and mechanism is None:
            text = f"disks cannot be limited on this node: {reason}"
            raise Unsupported(text, field="disk_limit_mb")

    def make(self, folder: Path, room: Room | None) -> Disk:
        """Where the sandbox of ``folder``, which is empty, writes. Raises ``OSError``."""
        self.check(room)
        if room is None:
            return Disk(Upper(folder), {})
        limits = {"disk_mb": room.disk_mb, "inodes": room.inodes}
        if self._found[0] == "quota":
            inner = folder / _INNER
            inner.mkdir(mode=0o700)
            return Disk(Upper(inner), {**limits, "project": self._quotas.make(inner, room)})
        fd, number = self._images.make(folder, room)
        return Disk(Upper(_seen(fd)), {**limits, "loop": number}, fd)

    @contextmanager
    def opened(self, folder: Path, note: Note) -> Iterator[Upper]:
        """Where the sandbox writes, while the context lasts."""
        if "loop" not in note:
            yield Upper(folder / _INNER if "project" in note else folder)
            return
        fd = self._images.again(folder, note["loop"])
        try:
            yield Upper(_seen(fd))
        finally:
            os.close(fd)

    def give_up(self, folder: Path, note: Note) -> None:
        """Nothing of it is needed any more: called before its processes are killed."""
        if "loop" in note:
            self._images.give_up(folder, note["loop"])

    def gone(self, folder: Path, note: Note) -> None:
        """Its processes are gone: returns when removing the folder frees its room."""
        if "loop" in note:
            self._images.gone(folder, note["loop"])
        elif (folder / _INNER).is_dir():
            self._quotas.drop(folder / _INNER)

    def use(self, pid: int, note: Note) -> Use:
        """What is taken of a limited disk: as the root of its process ``pid`` says."""
        if not note:
            return Use()
        try:
            found = os.statvfs(f"/proc/{pid}/root")
        except OSError:  # it ended
            return Use()
        return use_of(
            blocks=found.f_blocks, free=found.f_bfree, available=found.f_bavail,
            unit=found.f_frsize, inodes_free=found.f_favail,
        )  # fmt: skip

    def used_bytes(self, folder: Path, pid: int, note: Note) -> int:
        """Bytes that the sandbox has written. Without a limit nobody counts: its layer is
        looked through, up to a bound."""
        if note:
            return self.use(pid, note).used_bytes
        return _size(Upper(folder).upper)


def _seen(fd: int) -> Path:
    return Path(f"/proc/self/fd/{fd}")


def _size(top: Path) -> int:
    """Bytes on disk of what is below, each file once. The sandbox may change it meanwhile:
    nothing is resolved through a link."""
    total, seen, links = 0, 0, set[int]()
    try:
        root = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # the sandbox is gone
        return 0
    waiting = [b"."]
    try:
        while waiting and seen < ENTRIES_MAX:
            below = waiting.pop()
            for name, status in _entries(root, below):
                seen += 1
                if stat.S_ISDIR(status.st_mode):
                    waiting.append(below + b"/" + name)
                elif status.st_nlink > 1:
                    if status.st_ino in links:
                        continue
                    links.add(status.st_ino)
                total += status.st_blocks * 512
    finally:
        os.close(root)
    return total


def _entries(root: int, below: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    try:
        folder = open_beneath(root, below, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # removed meanwhile, or replaced
        return
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    yield os.fsencode(entry.name), entry.stat(follow_symlinks=False)
    finally:
        os.close(folder)
