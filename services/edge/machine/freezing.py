"""Standing still: all processes of a sandbox's ``work`` groups, but not its agent.

Owns: freezing as a whole or not at all, thawing. Does not own: which freezer there is
(:mod:`services.edge.machine.cgroups`), when to pause. Blocking; called in threads.

The freezer of cgroup v2 is preferred, also beside v1 controllers: what it holds can be
killed at once, and reports its state by events. What v1's ``freezer`` holds dies only
when it is thawed.
"""

from __future__ import annotations

import select
import time
from pathlib import Path

from services.edge.machine.cgroups import WORK, Groups, Kind
from shared.errors import Unavailable

FREEZE_S = 5.0
"""A process in an uninterruptible call (a hung disk) cannot be frozen for so long."""
POLL_S = 0.0005


def freeze(groups: Groups, *, kind: Kind, timeout_s: float = FREEZE_S) -> None:
    """Returns when every process stands still. Raises ``Unavailable`` when that does
    not come about in time: then they all go on."""
    try:
        _order(groups, kind, frozen=True)
        done = _await_v2(groups, timeout_s) if kind == "v2" else _await_v1(groups, timeout_s)
    except OSError as err:
        done, why = False, err.strerror
    else:
        why = f"a process does not stand still within {timeout_s:g} s"
    if not done:
        thaw(groups, kind=kind)
        raise Unavailable(f"the sandbox cannot be frozen: {why}", cause="runtime")


def thaw(groups: Groups, *, kind: Kind) -> None:
    """Every process goes on. Raises ``Unavailable``."""
    try:
        _order(groups, kind, frozen=False)
    except OSError as err:
        raise Unavailable(f"the sandbox cannot be thawed: {err.strerror}") from err


def is_frozen(groups: Groups, *, kind: Kind) -> bool:
    """Whether the sandbox was told to stand still, whoever told it."""
    try:
        if kind == "v2":
            return (_v2(groups) / "cgroup.freeze").read_text().strip() == "1"
        return (_v1(groups) / "freezer.state").read_text().strip() != "THAWED"
    except OSError:
        return False


def _v2(groups: Groups) -> Path:
    return Path(groups.v2 or "/nonexistent", WORK)


def _v1(groups: Groups) -> Path:
    return Path(groups.v1.get("freezer", "/nonexistent"), WORK)


def _order(groups: Groups, kind: Kind, *, frozen: bool) -> None:
    if kind == "v2":
        (_v2(groups) / "cgroup.freeze").write_text(str(int(frozen)))
    else:
        (_v1(groups) / "freezer.state").write_text("FROZEN" if frozen else "THAWED")


def _await_v2(groups: Groups, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    with (_v2(groups) / "cgroup.events").open() as events:
        poll.register(events, select.POLLPRI | select.POLLERR)
        while "frozen 1" not in events.read():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            poll.poll(left_s * 1e3)
            events.seek(0)
    return True


def _await_v1(groups: Groups, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    state = _v1(groups) / "freezer.state"
    while state.read_text().strip() != "FROZEN":
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
