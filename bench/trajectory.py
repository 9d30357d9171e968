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

ROUNDS, QUICK_ROUNDS = 1_000, 300
WARM = 50
BLOCKS, QUICK_BLOCKS = 7, 0
COMMANDS = 300
WINDOW_S = 4.0
"""For as many commands, and for what they cause to arrive."""
THREADS = 16
STEPS, QUICK_STEPS = 4_000, 800
FILES, QUICK_FILES = 100, 30
ARGS = DSecContainerRunArgs(
    container_image=BASE, memory_limit_mb=256, cpu_cores_limit=1, init_user="root"
)


async def overhead(client: Any, system: Any, *, quick: bool) -> dict[str, Any]:
    """``trajectory_overhead``: share by which the median command is slower with the log;
    CPU of all processes per command with and without it, in µs (not with ``quick``)."""
    rounds = QUICK_ROUNDS if quick else ROUNDS
    async with local_system(env={"DSEC_TRAJECTORY": "0"}) as (bare_system, bare_client):
        sides = {"with": (client, system), "without": (bare_client, bare_system)}
        sandboxes = {name: await c.run_container(ARGS) for name, (c, _) in sides.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + WARM):
            for name in _turn(number):
                sandbox = sandboxes[name]
                took_s = await timed(lambda s=sandbox: s.exec(["true"]))
                if number >= WARM:
                    times[name].append(took_s)
        cpu_us: dict[str, list[float]] = {name: [] for name in sides}
        for block in range(QUICK_BLOCKS if quick else BLOCKS):
            for name in _turn(block):
                cpu_us[name].append(await _cpu_us(sandboxes[name], sides[name][1]))
        for sandbox in sandboxes.values():
            await sandbox.stop()
    medians = {name: percentile(samples, 0.5) for name, samples in times.items()}
    return {
        "trajectory_overhead": round(medians["with"] / medians["without"] - 1, 3),
        **{f"exec_p50_ms_{name}_log": round(m * 1e3, 3) for name, m in medians.items()},
        **{f"exec_cpu_us_{name}_log": round(percentile(v, 0.5)) for name, v in cpu_us.items() if v},
    }


def _turn(number: int) -> tuple[str, str]:
    return ("with", "without") if number % 2 else ("without", "with")


async def _cpu_us(sandbox: Any, system: Any) -> float:
    """CPU of the system per command, until all it caused has been done. What it uses when
    nothing happens is in it, of a time that is the same for both."""
    roots = {name: pid for name, pid in system.pids().items() if pid is not None}
    before, began = sum(processes.cpu_s(roots).values()), time.perf_counter()
    for _ in range(COMMANDS):
        await sandbox.exec(["true"])
    await asyncio.sleep(max(0.0, began + WINDOW_S - time.perf_counter()))
    return (sum(processes.cpu_s(roots).values()) - before) / COMMANDS * 1e6


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


async def provenance(client: Any, *, quick: bool) -> dict[str, Any]:
    """Of commands that run one right after the other and change a file each: share for which
    the command is found alone, mean number that come into question, and how often the right
    one is not among them."""
    count = QUICK_FILES if quick else FILES
    async with await client.run_container(ARGS) as sandbox:
        made = [await sandbox.exec(f"echo {n} > /tmp/{n}") for n in range(count)]
        log = sandbox.trajectory()
        found = [[c.seq for c in (await log.changed(f"/tmp/{n}")).candidates] for n in range(count)]
    return {
        "provenance_certain": round(sum(len(f) == 1 for f in found) / count, 3),
        "provenance_candidates": round(sum(map(len, found)) / count, 2),
        "provenance_missed": sum(m.seq not in f for m, f in zip(made, found, strict=True)),
    }
