"""exec: ``true`` through the SDK in a running sandbox, one at a time and in parallel.

Beside it, in turns, ``docker exec true`` through the Engine API; then bytes up and
down through the files API.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from bench.docker_peer import docker_peer
from bench.harness import in_turns, local_system, spread
from bench.images import BASE, rootfs
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 600, 150
PEER_EVERY = 6
SANDBOXES, PARALLEL = 16, 4
PARALLEL_S, QUICK_PARALLEL_S = 8.0, 3.0
FILE_BYTES = 64 * 1024 * 1024


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: p50_ms p99_ms docker_p50_ms ratio_docker execs_per_s up_mb_s down_mb_s."""
    args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512, cpu_cores_limit=1)
    with docker_peer(rootfs()) as peer:
        container = peer.start()
        async with local_system() as (_, client):
            sandbox = await client.run_container(args)
            for _ in range(20):
                await sandbox.exec("true")
            mine, docker = await in_turns(
                QUICK_ROUNDS if quick else ROUNDS,
                lambda: sandbox.exec("true"),
                lambda: peer.exec_true(container),
                peer_every=PEER_EVERY,
            )
            figures: dict[str, Any] = spread(mine) | spread(docker, "docker_")
            figures["ratio_docker"] = round(figures["docker_p50_ms"] / figures["p50_ms"], 1)
            seconds = QUICK_PARALLEL_S if quick else PARALLEL_S
            figures["execs_per_s"] = await _parallel(client, args, seconds)
            figures |= await _bulk(sandbox)
    return figures


async def _parallel(client: Any, args: Any, seconds: float) -> float:
    sandboxes = await client.create_many(args, n=SANDBOXES)
    done = 0
    end = time.perf_counter() + seconds

    async def worker(sandbox: Any) -> None:
        nonlocal done
        while time.perf_counter() < end:
            await sandbox.exec("true")
            done += 1

    await asyncio.gather(*(worker(s) for s in sandboxes for _ in range(PARALLEL)))
    await asyncio.gather(*(s.stop() for s in sandboxes))
    return round(done / seconds, 1)


async def _bulk(sandbox: Any) -> dict[str, float]:
    content = os.urandom(FILE_BYTES)
    start = time.perf_counter()
    await sandbox.files.write("/tmp/bulk", content)
    up = time.perf_counter() - start
    start = time.perf_counter()
    back = await sandbox.files.read("/tmp/bulk")
    down = time.perf_counter() - start
    if back != content:
        raise RuntimeError("the file came back changed")
    size_mb = FILE_BYTES / 1e6
    return {"up_mb_s": round(size_mb / up, 1), "down_mb_s": round(size_mb / down, 1)}
