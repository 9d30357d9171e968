"""What a run left behind while the system is still up.

Owns: rows, charges and what the machine holds for sandboxes of one node. Does not own:
what is left when the system has ended (:mod:`demo.leftovers`). Containers that wait for
work are no leak as long as they are not more than the pool may hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

import docker

from libdsec import DSecClient
from services.local import LocalSystem

SETTLE_S = 60.0
LOOK_S = 0.5
OVER = ("stopped", "failed", "rejected", "lost")
POOL_MAX = 32
"""Most warm containers that the driver keeps by itself."""


async def leaks(system: LocalSystem, client: DSecClient, before: Collection[str]) -> list[str]:
    """One line per thing of ``client``'s project, or of the node and not in ``before``,
    that is still there when everything had time to go."""
    end = time.monotonic() + SETTLE_S
    while True:
        found = [*await _booked(client), *sorted(set(machine(system)) - set(before))]
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(LOOK_S)


async def _booked(client: DSecClient) -> list[str]:
    rows = [f"row {s.id} {s.state}" async for s in client.list() if s.state not in OVER]
    used = (await client.quotas.get(client.project)).used
    charged = {name: getattr(used, name) for name in ("sandboxes", "cores", "memory_mb")}
    return rows + [f"charge {name} {value}" for name, value in charged.items() if value]


def machine(system: LocalSystem) -> list[str]:
    """What the node's machine holds for sandboxes: a line each."""
    found: list[str] = []
    for name in system.services:
        if name.startswith("edge-"):
            node = name.removeprefix("edge-")
            found += _node(node, system.state_dir / "nodes" / node)
    return found


def _node(node: str, folder: Path) -> list[str]:
    engine = docker.from_env(timeout=30)
    listed = engine.api.containers(all=True, filters={"label": f"dsec.node={node}"})
    alive = {one["Id"] for one in listed}
    folders = [p for p in folder.glob("**/sandboxes/*") if p.is_dir()]
    uids = {p.name for p in folders}
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    found = [f"folder {p.name}" for p in folders]
    found += [f"mount {line.split()[1]}" for line in mounts if any(u in line for u in uids)]
    if len(alive) > POOL_MAX:
        found.append(f"containers: {len(alive)}, more than the pool's {POOL_MAX}")
    return found + _groups(node, alive)


def _groups(node: str, alive: Collection[str]) -> list[str]:
    """Control groups of containers that are gone, with their processes."""
    found = []
    for root, names, _ in os.walk("/sys/fs/cgroup"):
        if Path(root).name != node:
            continue
        for name in set(names) - set(alive):
            if len(name) == 64:
                with contextlib.suppress(OSError):  # it may go meanwhile
                    pids = (Path(root, name) / "cgroup.procs").read_text().split()
                    found.append(f"group {root}/{name} with {len(pids)} processes")
        names.clear()
    return found
