"""Memory of frozen sandboxes, given back: file pages are dropped, anonymous ones swapped.

Owns: how much at a time, when it is enough, the memory settings of a group at all other
times. Does not own: swap (:mod:`services.edge.machine.swapspace`), who is frozen. Blocking;
called in threads.

Reclaim goes in steps, because a step is one system call that nothing can interrupt: so
a resume waits for one step at most. cgroup v2 is asked by ``memory.reclaim``. v1 has no
such file, but gives memory back when its limit is lowered; the kernel lowers a limit
only once the usage fits, so a step that fails leaves the limit as it was. Nobody
allocates meanwhile: the processes are frozen. Beside the steps other threads push pages out
(:mod:`services.edge.machine.pageout`).
"""

from __future__ import annotations

import contextlib
import errno
import threading
from dataclasses import dataclass
from pathlib import Path

from services.edge.machine import pageout
from services.edge.machine.cgroups import WORK, CgroupDriver, Groups, Limits
from shared.errors import Unavailable

FLOOR_BYTES = 4 << 20
"""What is left: page tables and the kernel's own cannot be given back."""
STEP_BYTES = 4 << 20
STALLS_MAX = 6
STALL_S = 0.02
"""Pages that are on their way to or from swap can be had a little later."""
SWAPPINESS = 100
"""Anonymous memory is as good as that of files: nobody uses either."""
UNLIMITED = "-1"
_NO_MORE = (errno.EBUSY, errno.EAGAIN, errno.ENOMEM)


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """Bytes in use before and after."""

    before: int
    after: int


def next_step(used: int, *, stalls: int) -> int | None:
    """The bytes that the next step is to give back, ``None`` when it is enough.
    ``stalls``: steps in a row that gave nothing."""
    if used <= FLOOR_BYTES or stalls >= STALLS_MAX:
        return None
    return min(STEP_BYTES, used - FLOOR_BYTES)


def settled(limits: Limits, *, v1: bool, inherited_swappiness: str) -> dict[str, str]:
    """The files of a group and their content while nothing is reclaimed."""
    size = None if limits.memory_mb is None else limits.memory_mb << 20
    if v1:
        limit = UNLIMITED if size is None else str(size)
        return {"memory.limit_in_bytes": limit, "memory.swappiness": inherited_swappiness}
    return {"memory.swap.max": "max" if size is None else str(limits.swap_mb << 20)}


def give_back(groups: Groups, limits: Limits, *, stop: threading.Event) -> Reclaimed:
    """Gives back what it can until ``stop``; the settings are as before when it
    returns. Raises ``Unavailable`` when the kernel refuses for another reason than
    that there is no more to be had."""
    work = _work(groups)
    v1 = "memory" in groups.v1
    before = used_bytes(groups)
    try:
        _write(work, {"memory.swappiness": str(SWAPPINESS)} if v1 else {"memory.swap.max": "max"})
        with pageout.pushing(CgroupDriver.workload(groups), stop):
            _lower(groups, work, stop, v1=v1)
    except OSError as err:
        raise Unavailable(f"memory cannot be reclaimed: {err}", cause="runtime") from err
    finally:
        settle(groups, limits)
    return Reclaimed(before, used_bytes(groups))


def _lower(groups: Groups, work: Path, stop: threading.Event, *, v1: bool) -> None:
    stalls = 0
    while not stop.is_set():
        used = used_bytes(groups)
        step = next_step(used, stalls=stalls)
        if step is None:
            return
        _step(work, used, step, v1=v1)
        stalls = stalls + 1 if used_bytes(groups) >= used else 0
        if stalls:
            _drain(work)
            stop.wait(STALL_S)


def settle(groups: Groups, limits: Limits) -> None:
    """Puts the memory settings to what they are while nothing is reclaimed, whatever an
    edge that was killed left. Raises ``Unavailable``."""
    work = _work(groups)
    try:
        v1 = "memory" in groups.v1
        parent = work.parent / "memory.swappiness"
        inherited = parent.read_text().strip() if v1 else ""
        _write(work, settled(limits, v1=v1, inherited_swappiness=inherited))
    except OSError as err:
        raise Unavailable(f"the memory limit cannot be restored: {err}", cause="runtime") from err


def used_bytes(groups: Groups) -> int:
    """Memory that the workload occupies now."""
    name = "memory.usage_in_bytes" if "memory" in groups.v1 else "memory.current"
    return int((_work(groups) / name).read_text())


def _work(groups: Groups) -> Path:
    return Path(groups.v1.get("memory") or groups.v2 or "/nonexistent", WORK)


def _write(work: Path, wanted: dict[str, str]) -> None:
    for name, text in wanted.items():
        path = work / name
        if path.exists():  # a kernel without swap accounting has no memory.swap.max
            path.write_text(text)


def _drain(work: Path) -> None:
    """Has every CPU hand in the pages it still keeps for the group, on v1."""
    with contextlib.suppress(OSError):  # EBUSY: some are still held
        (work / "memory.force_empty").write_text("0")


def _step(work: Path, used: int, step: int, *, v1: bool) -> None:
    try:
        if v1:
            (work / "memory.limit_in_bytes").write_text(str(used - step))
            return
        try:
            (work / "memory.reclaim").write_text(f"{step} swappiness=max")
        except OSError as err:
            if err.errno != errno.EINVAL:  # before Linux 6.16 it takes a number only
                raise
            (work / "memory.reclaim").write_text(str(step))
    except OSError as err:
        if err.errno not in _NO_MORE:
            raise
