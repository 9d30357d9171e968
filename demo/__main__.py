"""``make demo``: from nothing to rewards on real containers.

Builds a base image and tasks (cached), starts the local system, registers images,
runs rollouts, prints the table, and says what was left behind: nothing.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from demo.baseimage import base_image
from demo.cache import cache_dir
from demo.leftovers import leftovers
from demo.results import Rollout, problems, render, summarise
from demo.rollouts import BASE, GROUP, run_all, workspace_image
from demo.tasks import Task, build_tasks
from libdsec import DSecClient
from services.local import LocalOptions, LocalSystem

OVER = {"stopped", "failed", "rejected", "lost"}
SETTLE_S = 20.0
WARM = {"DSEC_CONTAINER_POOL_SIZE": "32", "DSEC_CONTAINER_POOL_MAX": "40"}
"""As many warm shells as there will be sandboxes: they start while images are imported."""
console = Console(width=None if sys.stdout.isatty() else 110)


async def _register(client: DSecClient, rootfs: Path, tasks: Sequence[Task]) -> None:
    known = {image.name for image in await client.images.list()}
    if BASE not in known:
        console.print(f"importing [bold]{BASE}[/]")
        await client.images.create(BASE, path=str(rootfs))
    for task in tasks:
        name = workspace_image(task)
        if name not in known:
            console.print(f"importing [bold]{name}[/] (workspace)")
            await client.images.create(
                name, path=str(task.workspace_dir), kind="workspace", prefix="/workspace"
            )


async def _rows_left(client: DSecClient) -> list[str]:
    end = time.monotonic() + SETTLE_S
    while True:
        left = [f"row {s.id} {s.state}" async for s in client.list() if s.state not in OVER]
        if not left or time.monotonic() > end:
            return left
        await asyncio.sleep(0.2)


async def _rollouts(client: DSecClient, tasks: Sequence[Task]) -> list[Rollout]:
    columns = (
        TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("rollouts", total=len(tasks) * GROUP)
        return await run_all(client, tasks, lambda: progress.advance(bar))


async def _session(
    state: Path, rootfs: Path, tasks: Sequence[Task]
) -> tuple[list[Rollout], list[str]]:
    options = LocalOptions(
        driver="container", state_dir=state, image_roots=[cache_dir()], env=WARM
    )
    async with LocalSystem(options) as system:
        console.print("the local system is up: " + ", ".join(system.services))
        async with DSecClient(
            url=system.url, api_key=system.admin_key, project=system.project
        ) as client:
            await _register(client, rootfs, tasks)
            console.print(f"running {len(tasks)} tasks x {GROUP} sandboxes")
            rollouts = await _rollouts(client, tasks)
            return rollouts, await _rows_left(client)


def main() -> int:
    """Exit code 0 when every reward is as it must be and nothing is left."""
    rootfs = base_image(say=console.print)
    tasks = build_tasks(rootfs, say=console.print)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="dsec-demo-") as state:
        rollouts, rows = asyncio.run(_session(Path(state), rootfs, tasks))
        left = [*rows, *leftovers(Path(state))]
    console.print(render(summarise(rollouts)))
    for line in left:
        console.print(f"left behind: {line}", style="red")
    for line in problems(rollouts):
        console.print(line, style="red")
    good = not left and not problems(rollouts)
    seconds = time.perf_counter() - start
    verdict = "all rewards as they must be, nothing left behind" if good else "not as it must be"
    console.print(f"{verdict} ({len(rollouts)} rollouts in {seconds:.0f} s)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
