"""``python -m demo.loops``: the same loop in the trainer and in a worker.

In the worker's case the trainer goes away in the middle, and another one goes on
listening: it sees every event once, and nothing was done twice.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from demo.baseimage import base_image
from demo.cache import cache_dir
from demo.loops import model
from demo.loops.solve import solve
from demo.workerimage import register
from libdsec import DSecClient, DSecContainerRunArgs, rollout
from services.local import LocalOptions, LocalSystem

BASE = "demo-base:1"
GROUP = 4
LEAVE_AFTER = 6
"""Events after which the first listener goes away."""
WORKER: dict[str, Any] = {"memory_limit_mb": 512, "cpu_cores_limit": 1, "init_user": "root"}


def prompts(image: str) -> list[dict[str, Any]]:
    """Two tasks: one that the model solves, and one whose check asks for more."""
    tasks = []
    for name, lines in (("one", ["a", "b", "c"]), ("two", ["x", "y"])):
        path = f"/tmp/{name}"
        tasks.append({
            "image": image, "task": {"file": path, "lines": lines},
            "check": f"test $(wc -l < {path}) -eq 3",
        })  # fmt: skip
    return tasks


async def in_worker(client: DSecClient, layers: Sequence[str]) -> list[rollout.Result]:
    """The run in a worker: listened to by two trainers, one after the other."""
    args = DSecContainerRunArgs(layers=layers, **WORKER)
    seen = []
    async with await rollout.submit(
        client, "demo-worker", loop=solve, prompts=prompts(BASE), group_size=GROUP, args=args,
        routes=["model"],
    ) as run:  # fmt: skip
        async for event in run.events():
            seen.append(event)
            if len(seen) == LEAVE_AFTER:
                break
    print(f"  the first trainer saw {len(seen)} events and is gone")
    async with await rollout.attach(client, "demo-worker") as run:
        async for event in run.events(after=seen[-1].seq):
            seen.append(event)
        results = await run.results()
        await run.stop()
    whole = [event.seq for event in seen] == list(range(len(seen)))
    print(f"  the second one saw the other {len(seen) - LEAVE_AFTER}; each once: {whole}")
    return results


async def both(state: Path) -> bool:
    """Whether both ways came to the same."""
    async with model.serving() as (_, port):
        options = LocalOptions(
            driver="container", state_dir=state / "state", image_roots=[cache_dir(), state],
            env={"DSEC_ROUTES": f"model=127.0.0.1:{port}"},
        )  # fmt: skip
        async with (
            LocalSystem(options) as system,
            DSecClient(url=system.url, api_key=system.admin_key, project=system.project) as client,
        ):
            await client.images.create(BASE, path=str(base_image(say=print)))
            layers = await register(client, state, base=BASE)
            print("in the trainer:")
            mine = await rollout.here(
                client, "demo-here", loop=solve, prompts=prompts(BASE), group_size=GROUP,
                routes={"model": port},
            )  # fmt: skip
            print("in a worker:")
            theirs = await in_worker(client, layers)
    for name, results in (("trainer", mine), ("worker", theirs)):
        print(f"  {name}: {[result.value for result in results]}")
    return [r.value for r in mine] == [r.value for r in theirs] and len(mine) == 2 * GROUP


def main() -> int:
    """Exit code 0 where both ways came to the same."""
    with tempfile.TemporaryDirectory(prefix="dsec-loops-") as state:
        return 0 if asyncio.run(both(Path(state))) else 1


if __name__ == "__main__":
    sys.exit(main())
