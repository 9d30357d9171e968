"""``make chaos``: rollouts under faults on a local system with real containers."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from demo.baseimage import base_image
from demo.cache import cache_dir
from demo.leftovers import leftovers
from services.local import LocalOptions, LocalSystem
from sim.chaos import trace as traces
from sim.chaos import workload
from sim.chaos.scene import Scene
from sim.chaos.trace import Trace

ENV = {"DSEC_PRESSURE_CPU": "1.1"}
"""The load is part of the run: a busy machine is not to be taken for a full node."""


def main() -> int:
    """Exit code 0 when everything held."""
    args = _parser().parse_args()
    trace = traces.load(args.trace) if args.trace else _made(args)
    if args.save_trace:
        traces.save(trace, args.save_trace)
    report = _played(trace, args.at_once)
    print(report["summary"])
    if args.report:
        args.report.write_text(json.dumps(report, indent=1) + "\n")
    if args.json:
        print(json.dumps({k: v for k, v in report.items() if k != "summary"}))
    return 0 if report["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    shape = workload.Shape()
    parser = argparse.ArgumentParser(prog="python -m sim.chaos", description=__doc__)
    add = parser.add_argument
    add("--seed", type=int, default=1, help="what the trace is made from")
    add("--scale", type=float, default=0.1, help="factor of all waits, burns and sizes")
    add("--batches", type=int, default=shape.batches, help="trainer processes, a job each")
    add("--groups", type=int, default=shape.groups, help="prompts of a trainer")
    add("--group-size", type=int, default=shape.group_size, help="rollouts of a prompt")
    add("--calls", type=float, default=shape.calls, help="median number of calls of a rollout")
    add("--tasks", default=",".join(shape.tasks), help="names, separated by commas")
    add("--at-once", type=int, default=2, help="trainers side by side")
    add("--trace", type=Path, help="run this trace instead of making one")
    add("--save-trace", type=Path, help="write the trace here")
    add("--report", type=Path, help="write the report here as JSON")
    add("--json", action="store_true", help="one JSON object as the last line")
    return parser


def _made(args: argparse.Namespace) -> Trace:
    shape = workload.Shape(
        batches=args.batches, groups=args.groups, group_size=args.group_size,
        calls=args.calls, tasks=args.tasks.split(","),
    )  # fmt: skip
    return workload.make(args.seed, shape=shape, scale=args.scale)


def _played(trace: Trace, at_once: int) -> dict[str, Any]:
    base_image(say=print)
    with tempfile.TemporaryDirectory(prefix="dsec-chaos-") as name:
        folder = Path(name)
        report = asyncio.run(_on_system(trace, folder, at_once))
        left = leftovers(folder / "state")
    report["checks"]["nothing is left when the system has ended"] = left
    if left:
        report["passed"] = False
        report["summary"] += "\n  NO  nothing is left when the system has ended\n" + "\n".join(left)
    return report


async def _on_system(trace: Trace, folder: Path, at_once: int) -> dict[str, Any]:
    images = folder / "images"
    images.mkdir()
    options = LocalOptions(
        driver="container", state_dir=folder / "state", image_roots=[cache_dir(), images], env=ENV
    )
    async with LocalSystem(options) as system:
        scene = Scene(system=system, images=images, folder=folder / "runs", at_once=at_once)
        return await scene.play(trace)


if __name__ == "__main__":
    sys.exit(main())
