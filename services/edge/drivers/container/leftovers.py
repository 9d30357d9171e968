"""What crashes left of containers, and its removal.

Owns: finding and removing shells and sandboxes that belong to nobody. Does not own: which
belong to somebody (the driver), ending a container's processes (:mod:`.shells`).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from services.edge.disks.disks import Disks, Note
from services.edge.drivers.container import folders
from services.edge.drivers.container.engine import Engine, Shell
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.shells import Shells
from services.edge.machine.cgroups import Groups
from shared.errors import DsecError


class Leftovers(ABC):
    """See the module."""

    _settings: ContainerSettings
    _engine: Engine
    _instance: str
    _disks: Disks

    @property
    @abstractmethod
    def shells(self) -> Shells: ...

    async def _remove_files(
        self, uid: str | None, name: str | None, *, disk: Note | None = None
    ) -> None:
        gone = []
        if uid:
            gone.append(self._settings.sandboxes_dir / uid)
        if name:
            gone.append(self._settings.shells_dir / name)

        def work() -> None:
            if uid:
                self._disks.gone(self._settings.sandboxes_dir / uid, disk or {})
            for folder in gone:
                shutil.rmtree(folder, ignore_errors=True)
                if folder.exists():
                    shutil.rmtree(folder)

        await self.shells.thread(work)

    async def _sweep_shells(self) -> None:
        """Removes shells of earlier edge processes that no sandbox has."""
        metas = folders.noted(self._settings.sandboxes_dir)
        kept = {str(meta.get("container")) for meta in metas.values()}
        for shell in await self._engine.shells():
            if shell.id not in kept and shell.instance != self._instance:
                await self._sweep_shell(shell)

    async def _sweep_late(self) -> None:
        # a creation on its way when its edge was killed ends after the sweep at our start
        await asyncio.sleep(self._settings.engine_s)
        with contextlib.suppress(DsecError):
            await self._sweep_shells()

    async def _sweep_shell(self, shell: Shell) -> None:
        pid = await self._engine.pid(shell.id)
        if pid:
            await self.shells.end_process(pid, shell.name)
        await self._engine.remove(shell.id)
        await self._remove_files(None, shell.name)

    async def _sweep_one(self, uid: str, meta: Mapping[str, Any]) -> None:
        if "groups" in meta:
            await self.shells.end(Groups.of(meta["groups"]))
            await self._engine.remove(str(meta["container"]))
        await self._remove_files(uid, meta.get("name"), disk=folders.disk_of(meta))
