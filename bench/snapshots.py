"""Snapshots with 64 MiB of changes: packing, restoring, branching, through the whole system.

Part of the bench ``image``. The changes are random, so nothing is stored once for twice;
they are written before each packing and the clock starts with the call of the SDK. Restored
sandboxes and branches have run no command when the clock stops: their agents have answered.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

from bench.harness import local_system, timed
from bench.images import BASE
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 7, 3
CHANGED_MB, FILES = 64, 64
BRANCHES = 8
WARM_S = 3.0
"""Until the pool of warm shells is full again."""
WRITE = (
    f"mkdir -p /changed && for i in $(seq {FILES}); do "
    f"head -c {CHANGED_MB * 1024 * 1024 // FILES} /dev/urandom > /changed/$i; done"
)


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: pack_diff_s frozen_ms restore_ms fork8_ms (medians)."""
    env = {
        "DSEC_CONTAINER_POOL_SIZE": str(BRANCHES + 4), "DSEC_CONTAINER_POOL_MAX": "24",
        "DSEC_PRESSURE_CPU": "1.1",  # what is measured here loads the machine itself
    }  # fmt: skip
    packed: list[float] = []
    frozen: list[float] = []
    restored: list[float] = []
    forked: list[float] = []
    async with local_system(env=env) as (_, client):
        args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512, init_user="root")
        async with await client.run_container(args) as sandbox:
            for number in range(QUICK_ROUNDS if quick else ROUNDS):
                await sandbox.exec(WRITE, check=True)
                await asyncio.sleep(WARM_S)
                began = time.perf_counter()
                layer = await sandbox.pack_diff(f"bench-snapshot:{number}")
                packed.append(time.perf_counter() - began)
                frozen.append(layer.frozen_s)
                began = time.perf_counter()
                other = await client.restore(layer)
                restored.append(time.perf_counter() - began)
                await other.stop()
                await asyncio.sleep(WARM_S)
                began = time.perf_counter()
                branches = await sandbox.fork(BRANCHES)
                forked.append(time.perf_counter() - began)
                await client.stop_many(branches)
            bare = await timed(lambda: sandbox.snapshot())
    return {
        "pack_diff_s": round(median(packed), 3),
        "frozen_ms": round(median(frozen) * 1e3, 2),
        "restore_ms": round(median(restored) * 1e3, 1),
        "fork8_ms": round(median(forked) * 1e3, 1),
        "snapshot_s": round(bare, 3),
        "changed_mb": CHANGED_MB,
    }
