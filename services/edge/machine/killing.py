"""Ending what runs in a sandbox, but not its agent: the ``work`` groups are killed.

Owns: that nothing which ran then runs on. Does not own: when that is asked, ending a
sandbox as a whole (:mod:`services.edge.machine.cgroups`). Blocking; called in threads.

The agent's helpers in these groups die with the rest, and it makes new ones: so the group
is never empty for long, and the processes to wait for are those that were there before.
A kill by group takes forks in flight with it; who is in it after the kill was made by the
agent.
"""

from __future__ import annotations

import time
from pathlib import Path

from services.edge.machine import freezing
from services.edge.machine.cgroups import WORK, CgroupDriver, Groups, Kind
from shared.errors import Unavailable

KILL_S = 10.0
POLL_S = 0.002


def kill_workload(groups: Groups, *, kind: Kind | None, timeout_s: float = KILL_S) -> None:
    """Kills every process of the workload and returns when they are gone. What v1's
    freezer holds is dead as soon as it goes on, and is not waited for. Raises
    ``Unavailable``."""
    before = set(CgroupDriver.workload(groups))
    try:
        Path(groups.v2 or "/nonexistent", WORK, "cgroup.kill").write_text("1")
    except OSError as err:
        raise Unavailable(f"processes cannot be killed: {err}", cause="runtime") from err
    if kind == "v1" and freezing.is_frozen(groups, kind=kind):
        return
    deadline = time.monotonic() + timeout_s
    while before.intersection(CgroupDriver.workload(groups)):
        if time.monotonic() > deadline:
            raise Unavailable("processes of the sandbox do not die", cause="runtime")
        time.sleep(POLL_S)
