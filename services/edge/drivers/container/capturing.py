"""Copies of what sandboxes changed, as snapshots and branches need them.

Owns: the folder of each capture, the moment at which the workload stands still for it,
who needs it. Does not own: how a folder is copied (:mod:`services.edge.snapshots.mirror`), packing,
what a branch is.

A capture is a folder ``<state_dir>/captures/<id>`` with the copy in ``tree`` and, once it
is whole, ``capture.json``. It is kept while somebody in this process holds it and while the
``meta.json`` of a sandbox names it, because that sandbox's root lies upon it.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from services.edge.disks.disks import Disks
from services.edge.drivers.container import folders
from services.edge.drivers.container.deaths import Sandbox
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.snapshotting import Captured
from services.edge.machine import freezing
from services.edge.machine.cgroups import CgroupDriver, Kind
from services.edge.snapshots.mirror import Mirror, mapped_for_writing
from shared.errors import InvalidRequest, NotFound

WHOLE = "capture.json"
TREE = "tree"
FREEZE_S = 1.0
"""A process in an uninterruptible call keeps the others still for this long, no longer."""
PASSES_MAX = 3
PASS_BYTES = 16 * 1024 * 1024
"""A pass beside the workload is followed by another while it copied more than this."""
ID_MAX = 64


class Capturing:
    """The captures of one driver. ``kind``: the freezer, ``None`` where there is none."""

    def __init__(
        self, settings: ContainerSettings, disks: Disks, kind: Callable[[], Kind]
    ) -> None:
        self._settings, self._disks = settings, disks
        self._kind = kind
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.threads = ThreadPoolExecutor(settings.capture_threads, "capture")
        self._copiers = ThreadPoolExecutor(settings.capture_threads, "copy")

    def folder(self, id: str) -> Path:
        """The copy of a whole capture. Raises ``NotFound``."""
        folder = self._place(id)
        if not (folder / WHOLE).exists():
            raise NotFound(f"there is no capture {id} on this node", field="captures")
        return folder / TREE

    def hold(self, id: str) -> None:
        """Keeps it until :meth:`release`."""
        with self._lock:
            self._held[id] += 1

    def release(self, id: str) -> None:
        """Lets go of it once; it goes when nobody needs it."""
        with self._lock:
            self._held[id] -= 1
            self._held += Counter()  # drops what is not positive
        self.collect()

    def collect(self) -> None:
        """Removes captures that nobody holds and no sandbox lies upon."""
        if not self._settings.captures_dir.exists():
            return
        metas = folders.noted(self._settings.sandboxes_dir)
        with self._lock:
            kept = {id for meta in metas.values() for id in meta.get("captures", ())}
            kept |= set(self._held)
            for folder in self._settings.captures_dir.iterdir():
                if folder.name not in kept:
                    shutil.rmtree(folder, ignore_errors=True)

    def take(self, sandbox: Sandbox, id: str, cancelled: Callable[[], bool]) -> Captured:
        """Copies what ``sandbox`` changed. Blocking; holds the result. Raises ``OSError``
        (disk) with nothing left of it."""
        below = tuple(str(one) for one in sandbox.handle.data.get("captures", ()))
        self.hold(id)
        try:
            folder = self._place(id)
            if (folder / WHOLE).exists():
                done = msgspec.json.decode((folder / WHOLE).read_bytes(), type=_Noted)
            else:
                done = self._copy(sandbox, folder, cancelled)
            trees = [str(self.folder(one)) for one in below] + [str(folder / TREE)]
        except BaseException:
            self.release(id)
            raise
        return Captured(
            id, trees, (*below, id), frozen_s=done.frozen_s, bytes=done.bytes,
            entries=done.entries, root=f"/proc/{sandbox.handle.data['pid']}/root",
        )  # fmt: skip

    def _copy(self, sandbox: Sandbox, folder: Path, cancelled: Callable[[], bool]) -> _Noted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700, parents=True)
        place = self._settings.sandboxes_dir / sandbox.uid
        with self._disks.opened(place, folders.disk_of(sandbox.handle.data)) as disk:
            noted = self._copy_from(disk.upper, sandbox, folder, cancelled)
        (folder / WHOLE).write_bytes(msgspec.json.encode(noted))
        return noted

    def _copy_from(
        self, upper: Path, sandbox: Sandbox, folder: Path, cancelled: Callable[[], bool]
    ) -> _Noted:
        mirror = Mirror(upper, folder / TREE, cancelled, self._copiers)
        copied = 0
        for _ in range(PASSES_MAX):
            done = mirror.bring_up()
            copied += done.bytes
            if done.bytes <= PASS_BYTES or sandbox.paused:
                break
        begun = time.monotonic()
        if not sandbox.paused:
            freezing.freeze(sandbox.groups, kind=self._kind(), timeout_s=FREEZE_S)
        try:
            pids = CgroupDriver.workload(sandbox.groups)
            done = mirror.bring_up(hot=mapped_for_writing(pids, upper), still=True)
        finally:
            if not sandbox.paused:
                freezing.thaw(sandbox.groups, kind=self._kind())
        frozen_s = 0.0 if sandbox.paused else time.monotonic() - begun
        return _Noted(frozen_s, copied + done.bytes, done.entries)

    def _place(self, id: str) -> Path:
        if not id.isascii() or not id.isalnum() or len(id) > ID_MAX:
            raise InvalidRequest("not the id of a capture", field="captures")
        return self._settings.captures_dir / id

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._copiers.shutdown(wait=False)


class _Noted(msgspec.Struct, frozen=True):
    frozen_s: float
    bytes: int
    entries: int

