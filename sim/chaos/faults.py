"""Faults of the system, each when its moment in the trace has come.

Owns: killing processes of the local system (whose keepers start them again), pausing and
resuming jobs. Does not own: trainers and their answers (:mod:`sim.chaos.run`).
"""

from __future__ import annotations

import asyncio
import os
import signal

from devstack import COMPONENTS
from libdsec.errors import DSecError
from sim.chaos.run import Run
from sim.chaos.trace import JobPause, ProcessKill

DOWN_S = 1.0
"""How long a store is away; a service is started again at once."""
TRIES = 60
AGAIN_S = 1.0


async def inject(run: Run) -> None:
    """All faults of the run's trace but those of trainers; cancel it when the run is
    over. What did not happen is not among the run's events."""
    faults = run.trace.faults
    async with asyncio.TaskGroup() as group:
        group.create_task(_processes(run, sorted(faults.processes, key=lambda k: k.share)))
        for pause in faults.pauses:
            group.create_task(_pause(run, pause))


async def _processes(run: Run, kills: list[ProcessKill]) -> None:
    """One after the other: a fault at a time, each with its recovery."""
    for kill in kills:
        due = kill.share * run.trace.steps
        await run.until(lambda due=due: run.account.steps >= due)  # type: ignore[misc]
        if kill.target in COMPONENTS:
            await run.system.infra.kill(kill.target)
            run.happened("killed", target=kill.target)
            await asyncio.sleep(DOWN_S)
            await run.system.infra.restart(kill.target)
        else:
            name = _process(run, kill.target)
            pid = run.system.pids()[name]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            run.happened("killed", target=kill.target)
            await asyncio.sleep(DOWN_S)
        await run.system.wait_ready()
        run.happened("ready again after", target=kill.target)


def _process(run: Run, target: str) -> str:
    if target != "edge":
        return target
    return next(name for name in run.system.services if name.startswith("edge-"))


async def _pause(run: Run, pause: JobPause) -> None:
    (batch,) = [b for b in run.trace.batches if b.name == pause.batch]
    await run.until(lambda: run.answered(batch) >= pause.step)
    await _job(run, "pause", run.job(batch))
    await asyncio.sleep(pause.seconds)
    await _job(run, "resume", run.job(batch))


async def _job(run: Run, verb: str, job: str) -> None:
    for _ in range(TRIES):
        try:
            found = await getattr(run.client.jobs, verb)(job)
        except DSecError as exc:
            if not exc.retryable:
                raise
            await asyncio.sleep(AGAIN_S)
            continue
        failed = [str(one) for one in found.values() if isinstance(one, DSecError)]
        run.happened(f"job {verb}d", sandboxes=len(found), refused=failed[:2] or "")
        return
