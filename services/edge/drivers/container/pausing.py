"""Sandboxes that stand still: frozen, their memory given back, and going on as before.

Owns: the order of it, and that what fails half-way is undone. Does not own: freezing
(:mod:`services.edge.machine.freezing`), reclaim, swap, read-ahead (modules of those names), when
to pause (the supervisor). The agent is not frozen: it answers, and its word that the
commands' clock goes on is the proof that a resumed sandbox lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

from services.edge.drivers.base import Feature
from services.edge.drivers.container.deaths import Sandbox
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.shells import Shells
from services.edge.machine import freezing, killing, prefetch, reclaim
from services.edge.machine.cgroups import CgroupDriver, Groups, Kind
from services.edge.machine.swapspace import Swap, SwapSpace
from shared.errors import DsecError, Unavailable, Unsupported

log = logging.getLogger(__name__)

MIB = 1 << 20
NO_FREEZER = "the kernel has neither cgroup.freeze nor the v1 freezer"
NO_RECLAIM = "the kernel has no memory.reclaim"
NOT_OPEN = Swap(False, "the driver is not open")


def pause_features(cgroups: CgroupDriver, swap: Swap) -> dict[str, Feature]:
    """What a pause does on this node: ``pause`` stands still, ``reclaim`` gives
    anonymous memory back too."""
    kind = cgroups.freezer
    if kind is None:
        return {"pause": Feature(False, NO_FREEZER), "reclaim": Feature(False, NO_FREEZER)}
    if not cgroups.reclaims:
        swap = Swap(False, NO_RECLAIM)
    gain = swap.reason if swap.usable else f"freeze only, {swap.reason}"
    return {
        "pause": Feature(True, f"cgroup {kind} freezer; {gain}"),
        "reclaim": Feature(swap.usable, swap.reason),
    }


class Pausing:
    """Pauses and resumes sandboxes of one driver."""

    def __init__(self, settings: ContainerSettings, shells: Shells, cgroups: CgroupDriver) -> None:
        self._shells = shells
        self._kind = cgroups.freezer
        self._reclaims = cgroups.reclaims
        self._agent_s = settings.agent_s
        self._prefetch_bytes = settings.prefetch_mb * MIB
        self._reclaiming = asyncio.Semaphore(settings.reclaim_concurrency)
        self._prefetching = asyncio.Semaphore(settings.reclaim_concurrency)
        self.swap = SwapSpace(settings.state_dir, settings.swap, settings.swap_mb)

    @property
    def kind(self) -> Kind:
        if self._kind is None:
            raise Unsupported(NO_FREEZER, field="backend")
        return self._kind

    async def pause(self, sandbox: Sandbox) -> None:
        """Stands still, or goes on as before and raises."""
        if sandbox.paused:
            return
        kind, groups = self.kind, sandbox.groups
        await self._end_prefetch(sandbox)
        try:
            await self._clock(sandbox, runs=False)
            await self._shells.thread(lambda: freezing.freeze(groups, kind=kind))
        except BaseException:
            await asyncio.shield(self._go_on(sandbox))
            raise
        sandbox.paused = True

    async def _go_on(self, sandbox: Sandbox) -> None:
        with contextlib.suppress(DsecError):
            await self._thaw(sandbox.groups)
        with contextlib.suppress(DsecError):
            await self._clock(sandbox, runs=True)

    async def resume(self, sandbox: Sandbox) -> None:
        """Goes on, or stands still as before and raises. Also for one whose state an
        edge that was killed left open."""
        kind, groups, limits = self.kind, sandbox.groups, sandbox.limits
        unsettled, was_paused = sandbox.unsettled, sandbox.paused

        def work() -> None:
            if unsettled:
                reclaim.settle(groups, limits)
            freezing.thaw(groups, kind=kind)

        try:
            await self._shells.thread(work)
            await self._clock(sandbox, runs=True)
        except BaseException:
            if was_paused:
                await asyncio.shield(self._stay(sandbox, kind))
            raise
        sandbox.paused = sandbox.unsettled = False
        if was_paused:
            self._begin_prefetch(sandbox)

    async def _stay(self, sandbox: Sandbox, kind: Kind) -> None:
        with contextlib.suppress(DsecError):
            await self._shells.thread(lambda: freezing.freeze(sandbox.groups, kind=kind))
        with contextlib.suppress(DsecError):
            await self._clock(sandbox, runs=False)

    async def reclaim(self, sandbox: Sandbox) -> int:
        """Gives back memory of a paused sandbox; how many bytes. A cancelled call ends
        within a step, with the limits as before."""
        if not sandbox.paused or not self._reclaims:
            return 0
        groups, limits, stop = sandbox.groups, sandbox.limits, threading.Event()
        async with self._reclaiming:
            sandbox.unsettled = True
            try:
                done = await self._shells.thread(
                    lambda: reclaim.give_back(groups, limits, stop=stop), cancel=stop.set
                )
            finally:
                stop.set()
        sandbox.unsettled = False
        log.debug("%s: %d bytes of %d are left", sandbox.uid, done.after, done.before)
        return max(0, done.before - done.after)

    async def clear(self, sandbox: Sandbox) -> None:
        """Everything that runs in it is killed, also where it stands still."""
        groups, kind = sandbox.groups, self._kind
        await self._shells.thread(lambda: killing.kill_workload(groups, kind=kind))

    async def leave(self, sandbox: Sandbox | None, groups: Groups, *, thaw: bool) -> None:
        """Before a sandbox is stopped: nothing is read ahead any more. ``thaw``: its
        processes are to hear that they should end."""
        if sandbox is not None:
            await self._end_prefetch(sandbox)
            sandbox.paused = False
        if not thaw or self._kind is None:
            return
        if sandbox is not None:
            with contextlib.suppress(DsecError):
                await self._shells.thread(lambda: reclaim.settle(groups, sandbox.limits))
        with contextlib.suppress(DsecError):
            await self._thaw(groups)

    async def _thaw(self, groups: Groups) -> None:
        kind = self.kind
        await self._shells.thread(lambda: freezing.thaw(groups, kind=kind))

    async def _clock(self, sandbox: Sandbox, *, runs: bool) -> None:
        try:
            async with asyncio.timeout(self._agent_s):
                await (sandbox.agent.resume() if runs else sandbox.agent.pause())
        except TimeoutError:
            raise Unavailable("the sandbox's agent does not answer", cause="runtime") from None

    # -- what is read ahead ---------------------------------------------------------

    def _begin_prefetch(self, sandbox: Sandbox) -> None:
        if self._prefetch_bytes and self.swap.state.usable:
            sandbox.prefetch = asyncio.create_task(self._prefetch(sandbox.groups))

    async def _prefetch(self, groups: Groups) -> None:
        stop = threading.Event()
        budget = self._prefetch_bytes

        def work() -> int:
            pids = CgroupDriver.workload(groups)
            return prefetch.bring_back(pids, budget=budget, stopped=stop.is_set)

        async with self._prefetching:
            try:
                await self._shells.thread(work, cancel=stop.set)
            except Exception as err:  # whoever needs the memory brings it back then
                log.warning("memory is not read ahead: %r", err)

    async def _end_prefetch(self, sandbox: Sandbox) -> None:
        task, sandbox.prefetch = sandbox.prefetch, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    # -- the driver opens and closes ----------------------------------------------------

    async def open(self) -> None:
        """Makes swap, where that is configured."""
        await self._shells.thread(self.swap.open)

    async def close(self, *, alone: bool) -> None:
        """Removes the swap that was made, unless sandboxes live on (not ``alone``) with
        memory in it."""
        await self._shells.thread(lambda: self.swap.close(keep_used=not alone))
