"""Rollouts under faults, in short: what ``make chaos`` shows at length."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.local import LocalSystem
from sim.chaos import workload
from sim.chaos.scene import Scene

pytestmark = [pytest.mark.docker, pytest.mark.slow]

SHAPE = workload.Shape(batches=2, group_size=4, calls=14, most_calls=24, tasks=["small"])


async def test_rollouts_survive_kills_of_everything(
    container_system: LocalSystem, tmp_path: Path
) -> None:
    """Trainers, the edge, the services and the stores are killed, a job is paused: every
    command runs once, rewards are those of a run in peace, nothing is left."""
    images = Path(container_system.options.image_roots[1])
    scene = Scene(system=container_system, images=images, folder=tmp_path)
    report = await scene.play(workload.make(2, shape=SHAPE, scale=0.03))
    assert report["passed"], report["summary"]
    assert 0 < report["faults"]["solved"] < report["faults"]["rollouts"]
