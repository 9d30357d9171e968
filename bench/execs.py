"""exec: ``true`` through the SDK in a running sandbox, one at a time and in parallel.

Beside it, in turns, ``docker exec true`` through the Engine API; then bytes up and
down through the files API, a long output while the edge's memory is watched, and what
the agent of a sandbox with one idle session keeps resident.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench import processes
from bench.docker_peer import docker_peer
from bench.harness import in_turns, local_system, spread, timed
from bench.images import BASE, rootfs
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 600, 150
PEER_EVERY, TURN = 6, 5
"""Commands come one after the other, as an agent's do: one by one between ``docker exec``, five
processes each, ours would be measured on the caches that these left."""
SANDBOXES, PARALLEL = 16, 4
PARALLEL_S, QUICK_PARALLEL_S = 8.0, 3.0
WARM_S = 1.0
FILE_BYTES = 64 * 1024 * 1024
FILE_ROUNDS, QUICK_FILE_ROUNDS = 5, 2
OUTPUT_BYTES = 100 * 1024 * 1024
WATCH_S = 0.02


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: p50_ms p99_ms docker_p50_ms ratio_docker, of the same argv; shell_p50_ms
    of a shell string; execs_per_s and the CPU that each of them takes, by process
    (cpu_us_*); up_mb_s down_mb_s; output_mb_s and what the edge grew by meanwhile
    (edge_growth_mb); memory of an agent with one idle session."""
    args = DSecContainerRunArgs(container_image=BASE, memory_limit_mb=512, cpu_cores_limit=1)
    with docker_peer(rootfs()) as peer:
        container = peer.start()
        async with local_system() as (system, client):
            pids = {name: pid for name, pid in system.pids().items() if pid is not None}
            sandbox = await client.run_container(args)
            for _ in range(20):
                await sandbox.exec("true")
            rounds = QUICK_ROUNDS if quick else ROUNDS
            mine, docker = await in_turns(
                rounds,
                lambda: sandbox.exec(["true"]),
                lambda: peer.exec_true(container),
                peer_every=PEER_EVERY,
                turn=TURN,
            )
            shell = [await timed(lambda: sandbox.exec("true")) for _ in range(rounds)]
            figures: dict[str, Any] = spread(mine) | spread(docker, "docker_")
            figures["ratio_docker"] = round(figures["docker_p50_ms"] / figures["p50_ms"], 1)
            figures["shell_p50_ms"] = spread(shell)["p50_ms"]
            seconds = QUICK_PARALLEL_S if quick else PARALLEL_S
            edge, node = next((p, n[5:]) for n, p in pids.items() if n.startswith("edge-"))
            figures |= await _parallel(client, args, seconds, (pids, node))
            figures |= await _bulk(sandbox, QUICK_FILE_ROUNDS if quick else FILE_ROUNDS)
            figures |= await _output(sandbox, edge)
            figures |= await _idle_session(client, args, node)
    return figures


async def _parallel(
    client: Any, args: Any, seconds: float, system: tuple[Mapping[str, int], str]
) -> dict[str, float]:
    sandboxes = await client.create_many(args, n=SANDBOXES)

    async def all_for(seconds: float) -> int:
        done, end = 0, time.perf_counter() + seconds

        async def worker(sandbox: Any) -> None:
            nonlocal done
            while time.perf_counter() < end:
                await sandbox.exec(["true"])
                done += 1

        await asyncio.gather(*(worker(s) for s in sandboxes for _ in range(PARALLEL)))
        return done

    await all_for(WARM_S)
    before, start = _cpu_s(*system), time.perf_counter()
    done = await all_for(seconds)
    elapsed, after = time.perf_counter() - start, _cpu_s(*system)
    await asyncio.gather(*(s.stop() for s in sandboxes))
    used = {f"cpu_us_{k}": round((after[k] - before[k]) / done * 1e6) for k in before}
    return {"execs_per_s": round(done / elapsed, 1)} | used


def _cpu_s(pids: Mapping[str, int], node: str) -> dict[str, float]:
    """By the part of the way: ``rest`` are services that only take part afterwards."""
    names = {f"agent-{pid}": pid for pid in processes.agents(node)}
    used = processes.cpu_s({**pids, **names, "client": os.getpid()})
    parts = dict.fromkeys(("client", "nats", "edge", "agents", "rest"), 0.0)
    for name, value in used.items():
        kind = name.partition("-")[0]
        part = "agents" if kind == "agent" else kind if kind in parts else "rest"
        parts[part] += value
    return parts


async def _bulk(sandbox: Any, rounds: int) -> dict[str, float]:
    content = os.urandom(FILE_BYTES)
    ups, downs = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        await sandbox.files.write("/tmp/bulk", content)
        ups.append(time.perf_counter() - start)
        start = time.perf_counter()
        back = await sandbox.files.read("/tmp/bulk")
        downs.append(time.perf_counter() - start)
        if back != content:
            raise RuntimeError("the file came back changed")
    size_mb = FILE_BYTES / 1e6
    return {
        "up_mb_s": round(size_mb / statistics.median(ups), 1),
        "down_mb_s": round(size_mb / statistics.median(downs), 1),
    }


async def _output(sandbox: Any, edge: int) -> dict[str, float]:
    """100 MiB of output, taken as it comes; how much the edge grows meanwhile."""
    count, before, peak = 0, processes.rss_mb(edge), 0.0

    def took(_stream: str, data: bytes) -> None:
        nonlocal count
        count += len(data)

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, processes.rss_mb(edge))
            await asyncio.sleep(WATCH_S)

    watching, start = asyncio.create_task(watch()), time.perf_counter()
    await sandbox.exec(
        f"head -c {OUTPUT_BYTES} /dev/zero", on_output=took, output_limit_bytes=2 * OUTPUT_BYTES
    )
    elapsed = time.perf_counter() - start
    watching.cancel()
    if count != OUTPUT_BYTES:
        raise RuntimeError(f"{count} of {OUTPUT_BYTES} bytes of output came")
    return {
        "output_mb_s": round(OUTPUT_BYTES / 1e6 / elapsed, 1),
        "edge_rss_mb": round(before, 1),
        "edge_growth_mb": round(max(peak - before, 0.0), 1),
    }


async def _idle_session(client: Any, args: Any, node: str) -> dict[str, float]:
    """What aether, its helpers and the shell of one idle session keep resident."""
    sandbox = await client.run_container(args)
    await sandbox.run_shell("true")
    await asyncio.sleep(1.0)
    try:
        return await asyncio.to_thread(processes.session_memory, node)
    finally:
        await sandbox.stop()
