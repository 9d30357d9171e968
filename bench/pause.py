"""pause: freezing, giving memory back and going on, beside Docker's pause and unpause.

Through the SDK, so the control plane is part of every figure; Docker's calls go to its
Engine API. Memory is that of a process in the sandbox, a quarter of it random; swap is
zram of the edge's own, where the machine allows it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench import trajectory
from bench.docker_peer import DockerPeer, docker_peer
from bench.harness import local_system, percentile, spread, timed
from bench.images import BASE, rootfs
from libdsec import DSecContainerRunArgs

ROUNDS, QUICK_ROUNDS = 100, 30
RESUMES, QUICK_RESUMES = 20, 6
JOB, QUICK_JOB = 200, 40
HOLD_MB = 400
GIVEN_BACK = 0.95
RECLAIM_MAX_S = 20.0
LOOK_S = 0.05
SWAP_MB = 8192
HOLD = f"""
import os, time
block = os.urandom(1 << 18) + bytes(1 << 18) + b"hello world 1234" * (1 << 15)
held = [bytes(bytearray(block)) for _ in range({HOLD_MB})]
print("held", flush=True)
time.sleep(3600)
"""


async def run(*, quick: bool) -> dict[str, Any]:
    """Figures: pause_p50_ms resume_exec_p50_ms reclaimed_share reclaim_s job200_s
    ratio_docker; those of :mod:`bench.trajectory`."""
    env = {
        "DSEC_CONTAINER_SWAP": "zram", "DSEC_CONTAINER_SWAP_MB": str(SWAP_MB),
        "DSEC_PRESSURE_CPU": "1.1",  # what is measured here loads the machine itself
    }  # fmt: skip
    with docker_peer(rootfs()) as peer:
        async with local_system(env=env) as (system, client):
            node = (await client.nodes.list())[0]
            feature = node.backends["container"].features["reclaim"]
            figures: dict[str, Any] = {"swap": feature.reason}
            figures |= await _pauses(client, peer, QUICK_ROUNDS if quick else ROUNDS)
            figures |= await _memory(client, QUICK_RESUMES if quick else RESUMES)
            figures |= await _job(client, QUICK_JOB if quick else JOB)
            figures |= await trajectory.forwarding(client, quick=quick)
            figures |= await trajectory.provenance(client, quick=quick)
            figures |= await trajectory.overhead(client, system, quick=quick)
    return figures


def _args(memory_mb: int) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=BASE, memory_limit_mb=memory_mb,
        cpu_cores_limit=0.5, init_user="root",
    )  # fmt: skip


async def _pauses(client: Any, peer: DockerPeer, rounds: int) -> dict[str, Any]:
    """An idle sandbox and an idle container, in turns."""
    mine: dict[str, list[float]] = {"pause": [], "resume": []}
    docker: dict[str, list[float]] = {"pause": [], "resume": []}
    container = peer.start()
    async with await client.run_container(_args(256)) as sandbox:
        for _ in range(rounds):
            mine["pause"].append(await timed(sandbox.pause))
            mine["resume"].append(await timed(sandbox.resume))
            docker["pause"].append(await timed(lambda: asyncio.to_thread(container.pause)))
            docker["resume"].append(await timed(lambda: asyncio.to_thread(container.unpause)))
    figures: dict[str, Any] = {}
    for verb in ("pause", "resume"):
        figures |= spread(mine[verb], f"{verb}_") | spread(docker[verb], f"docker_{verb}_")
    figures["ratio_docker"] = round(figures["docker_pause_p50_ms"] / figures["pause_p50_ms"], 2)
    return figures


async def _memory(client: Any, rounds: int) -> dict[str, Any]:
    """A sandbox that holds much: what comes back, and the first command afterwards."""
    async with await client.run_container(_args(1024)) as sandbox:
        process = await sandbox.spawn("python3", "-c", HOLD)
        await anext(aiter(process.stdout))
        used = (await sandbox.metrics())["memory_bytes"]
        await sandbox.pause()
        left, taken_s = await _until_given_back(sandbox, used)
        firsts, seconds = [], []
        for _ in range(rounds):
            firsts.append(await timed(lambda: sandbox.exec("true")))
            seconds.append(await timed(lambda: sandbox.exec("true")))
            await sandbox.pause()
            await _until_given_back(sandbox, used)
        return {
            "reclaimed_share": round(1 - left / used, 4), "reclaim_s": round(taken_s, 3),
            "held_mb": round(used / 1e6), "first_resume_exec_ms": round(firsts[0] * 1e3, 3),
            **spread(firsts, "resume_exec_"),
            "next_exec_p50_ms": round(percentile(seconds, 0.5) * 1e3, 3),
        }  # fmt: skip


async def _until_given_back(sandbox: Any, used: float) -> tuple[float, float]:
    """Bytes that are left in use and seconds since the pause."""
    began = time.perf_counter()
    left = used
    while left > (1 - GIVEN_BACK) * used and time.perf_counter() - began < RECLAIM_MAX_S:
        await asyncio.sleep(LOOK_S)
        left = (await sandbox.metrics())["memory_bytes"]
    return left, time.perf_counter() - began


async def _job(client: Any, count: int) -> dict[str, Any]:
    """All sandboxes of a job, with one request."""
    async with client.job("bench-pause") as job:
        await job.create_many(_args(64), n=count, key="all")
        began = time.perf_counter()
        results = await job.pause()
        taken_s = time.perf_counter() - began
        states = [state for state in results.values() if state == "paused"]
        await job.stop()
    if len(states) != count:
        raise RuntimeError(f"{len(states)} of {count} sandboxes were paused")
    return {"job_count": count, f"job{count}_s": round(taken_s, 3)}
