"""Reads the kernel's counters of one sandbox: two small files."""

from __future__ import annotations

from pathlib import Path

from services.edge.drivers.counters import Counters
from services.edge.machine.cgroups import WORK, Groups, keyed, oom_file


def counters(groups: Groups) -> Counters:
    """What the workload ran into; what cannot be read counts as 0."""
    directory = groups.v1.get("pids") or groups.v2 or "/nonexistent"
    return Counters(
        pids_refused=keyed(Path(directory, WORK, "pids.events"), "max"),
        oom_kills=keyed(oom_file(groups), "oom_kill"),
    )
