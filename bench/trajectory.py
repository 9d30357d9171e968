"""What the trajectory log costs a command, and how fast a script gets its results again.

Owns: figures of ``bench pause``. Two systems at once, one without the log, take commands in
turns; their processes' CPU is counted until what was told has arrived.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from bench import processes
from bench.harness import local_system, percentile, timed
from bench.images import BASE
from libdsec import DSecContainerRunArgs, FastForward

ROUNDS, QUICK_ROUNDS = 600, 200
BLOCK = 50
ARRIVE_S = 1.5
"""Until records have got to the services: twice their lingering."""
THREADS = 16
STEPS, QUICK_STEPS = 4_000, 1_600
ARGS = DSecContainerRunArgs(
    container_image=BASE, memory_limit_mb=256, cpu_cores_limit=1, init_user="root"
)


async def overhead(client: Any, system: Any, *, quick: bool) -> dict[str, Any]:
    """``trajectory_overhead``: share by which the median command is slower with the log;
    CPU of all processes per command with and without it, in µs."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    async with local_system(env={"DSEC_TRAJECTORY": "0"}) as (bare_system, bare_client):
        sides = {"with": (client, system), "without": (bare_client, bare_system)}
        sandboxes = {name: await c.run_container(ARGS) for name, (c, _) in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + BLOCK):
            for name in _turn(number):
                sandbox = sandboxes[name]
                took_s = await timed(lambda s=sandbox: s.exec(["true"]))
                if number >= BLOCK:
                    times[name].append(took_s)
        cpu = dict.fromkeys(sides, 0.0)
        for block in range(max(2, rounds // (2 * BLOCK))):
            for name in _turn(block):
                cpu[name] += await _cpu_us(sandboxes[name], sides[name][1])
        for sandbox in sandboxes.values():
            await sandbox.stop()
    blocks = max(2, rounds // (2 * BLOCK))
    medians = {name: percentile(samples, 0.5) for name, samples in times.items()}
    return {
        "trajectory_overhead": round(medians["with"] / medians["without"] - 1, 3),
        **{f"exec_p50_ms_{name}_log": round(m * 1e3, 3) for name, m in medians.items()},
        **{f"exec_cpu_us_{name}_log": round(total / blocks) for name, total in cpu.items()},
    }


def _turn(number: int) -> tuple[str, str]:
    return ("with", "without") if number % 2 else ("without", "with")


async def _cpu_us(sandbox: Any, system: Any) -> float:
    """CPU of the system per command, until it is quiet; what it uses when nothing happens
    is taken off."""
    roots = {name: pid for name, pid in system.pids().items() if pid is not None}

    async def used(work: Any) -> tuple[float, float]:
        before, began = sum(processes.cpu_s(roots).values()), time.perf_counter()
        await work
        await asyncio.sleep(ARRIVE_S)
        took_s = time.perf_counter() - began
        return sum(processes.cpu_s(roots).values()) - before, took_s

    async def commands() -> None:
        for _ in range(BLOCK * 4):
            await sandbox.exec(["true"])

    idle_s, idle_took_s = await used(asyncio.sleep(0))
    busy_s, busy_took_s = await used(commands())
    return (busy_s - idle_s / idle_took_s * busy_took_s) / (BLOCK * 4) * 1e6


async def forwarding(client: Any, *, quick: bool) -> dict[str, Any]:
    """``fast_forward_per_s``: recorded commands that a script gets per second, reading the
    log included."""
    count = (QUICK_STEPS if quick else STEPS) // THREADS

    async def script(steps: FastForward) -> None:
        async def thread(name: str) -> None:
            mine = steps.thread(name)
            for number in range(count):
                await mine.exec("echo", str(number))

        await asyncio.gather(*(thread(str(n)) for n in range(THREADS)))

    async with await client.run_container(ARGS) as sandbox:
        recorded_s = await timed(lambda: script(sandbox.fast_forward()))
        forward_s = await timed(lambda: script(sandbox.fast_forward()))
    steps = count * THREADS
    return {
        "fast_forward_steps": steps, "recorded_per_s": round(steps / recorded_s),
        "fast_forward_per_s": round(steps / forward_s),
    }  # fmt: skip
