"""The container driver under test: on the real engine, with a small image.

Owns: a driver of its own node name and state folder, and finding what it left on the
machine. Does not own: other containers of the machine; they are never touched.
"""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.edge.drivers.base import Exited, Handle, Layer, StartSpec
from services.edge.drivers.container import ContainerDriver, ContainerSettings
from services.edge.machine.cgroups import remove_parent
from tests.integration.container.images import busybox_layer


@dataclass
class ContainerHarness:
    settings: ContainerSettings
    layer: Layer
    driver: ContainerDriver
    seen: list[Exited] = field(default_factory=list)
    drivers: list[ContainerDriver] = field(default_factory=list)

    def spec(self, **changes: Any) -> StartSpec:
        given = {"project": "test", "layers": [self.layer], "memory_mb": 64, "pids": 64}
        return StartSpec(**{**given, **changes})

    async def on_exit(self, exited: Exited) -> None:
        self.seen.append(exited)

    def exits(self) -> list[Exited]:
        return self.seen

    async def open(self, settings: ContainerSettings) -> ContainerDriver:
        driver = ContainerDriver(settings)
        await driver.open(self.on_exit)
        self.drivers.append(driver)
        return driver

    async def restart(self) -> ContainerDriver:
        """The connections of the old driver stay open, as those of a process that hangs
        would: the agent must prefer the new one."""
        for sandbox in self.driver._live.values():
            sandbox.stopping = True  # a dead process reports no deaths
        return await self.open(replace(self.settings, pool_size=0))

    async def crash(self, handle: Handle) -> None:
        os.kill(handle.data["pid"], signal.SIGKILL)

    def leftovers(self) -> set[str]:
        """Sandbox folders, groups named like their containers, processes' mounts."""
        root = self.settings.sandboxes_dir
        found = {f"folder {p.name}" for p in root.iterdir()}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                mounts = Path("/proc", pid, "mountinfo").read_text()
            except OSError:
                continue
            found |= {f"mount {p}" for p in mounts.split("upperdir=") if p.startswith(str(root))}
        return found


@asynccontextmanager
async def container_harness(folder: Path, **changes: Any) -> AsyncIterator[ContainerHarness]:
    """A driver with a small pool; everything of it is gone afterwards."""
    node = "test-" + secrets.token_hex(3)
    settings = ContainerSettings(
        node=node, state_dir=folder / "state",
        **{"pool_size": 2, "pool_max": 6, "cgroup_parent": f"dsec-{node}", **changes},
    )  # fmt: skip
    harness = ContainerHarness(settings, busybox_layer(folder), ContainerDriver(settings))
    await harness.driver.open(harness.on_exit)
    harness.drivers.append(harness.driver)
    try:
        yield harness
    finally:
        for driver in harness.drivers[1:]:
            await driver.close()
        harness.driver._live.clear()
        await harness.driver.sweep(frozenset())
        for shell in await harness.driver._engine.shells():
            if shell.instance != harness.driver._instance:
                await harness.driver._sweep_shell(shell)
        await harness.driver.close()
        parent = settings.cgroup_parent
        left = list(Path("/sys/fs/cgroup").glob(f"*/{parent}"))
        remove_parent(parent)
        assert not left, f"the driver left its control group {parent}"
