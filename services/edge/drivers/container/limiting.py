"""Limited disks of containers, as the driver's calls see them.

Owns: giving one up, what is taken of it, what is said where it is full. Does not own: what
bounds it (:mod:`services.edge.disks`), its making (the driver).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from services.edge.disks.disks import Disks
from services.edge.drivers.base import Handle, Usage
from services.edge.drivers.container.enforcing import Enforcing
from services.edge.drivers.container.folders import disk_of
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.shells import Shells
from services.edge.drivers.counters import Counters
from services.edge.machine.cgroups import Groups
from services.edge.machine.counting import counters
from shared.errors import DsecError, QuotaExceeded

FULL = ("ENOSPC", "EDQUOT")


class LimitedDisks(ABC):
    """Mixed into the driver."""

    _settings: ContainerSettings
    _disks: Disks
    _enforcing: Enforcing

    @property
    @abstractmethod
    def shells(self) -> Shells: ...

    async def usage(self, handle: Handle) -> Usage:
        usage = await self.shells.usage(Groups.of(handle.data["groups"]))
        folder = self._settings.sandboxes_dir / handle.uid
        pid, note = handle.data["pid"], disk_of(handle.data)
        used = await self.shells.thread(lambda: self._disks.used_bytes(folder, pid, note))
        way_out = self._enforcing.traffic(handle.uid)
        return replace(
            usage, disk_bytes=used, net_rx_bytes=way_out.received, net_tx_bytes=way_out.sent
        )

    async def counters(self, handles: Sequence[Handle]) -> list[Counters]:
        return await self.shells.thread(lambda: [self._counters(handle) for handle in handles])

    def _counters(self, handle: Handle) -> Counters:
        use = self._disks.use(handle.data["pid"], disk_of(handle.data))
        counted = counters(Groups.of(handle.data["groups"]))
        return replace(counted, disk_bytes=use.used_bytes, disk_full=use.full)

    async def _give_up_disk(self, handle: Handle) -> None:
        """Called before its processes are killed."""
        if note := disk_of(handle.data):
            folder = self._settings.sandboxes_dir / handle.uid
            await self.shells.thread(lambda: self._disks.give_up(folder, note))


@contextmanager
def limit_told(handle: Handle) -> Iterator[None]:
    """Names the limit where a sandbox's disk is full."""
    try:
        yield
    except DsecError as err:
        note = disk_of(handle.data)
        if not note or err.details.get("errno") not in FULL:
            raise
        limit = f"{note['disk_mb']} MiB and {note['inodes']} files"
        raise QuotaExceeded(
            f"{err.message}: its disk is limited to {limit}", field=err.field,
            details={**err.details, "disk_limit_mb": note["disk_mb"], "inodes": note["inodes"]},
        ) from err  # fmt: skip
