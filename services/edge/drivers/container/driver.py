"""The container driver: sandboxes as warm shells with a root attached late.

Owns: the life of a sandbox from a shell to nothing. Does not own: shells
(:mod:`.shells`), their number (:mod:`.pool`), the engine (:mod:`.engine`), removal of
containers (:mod:`.reaper`), deaths (:mod:`.deaths`), pausing (:mod:`.pausing`). Rules:
:mod:`services.edge.drivers.base`.

A sandbox's folder ``<state_dir>/sandboxes/<uid>`` holds its writable layer and, in
``meta.json``, which container it is, written before the container becomes its own: a
crash at any moment leaves something that :meth:`ContainerDriver.sweep` finds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.edge.agent.client import AgentClient
from services.edge.agent.commands import Defaults, resume_command, run_command
from services.edge.agent.ports import PortsOfAgent
from services.edge.disks.disks import Disks
from services.edge.drivers.base import (
    BackendReport,
    ExecIO,
    ExecOutcome,
    ExecSpec,
    Feature,
    Handle,
    Inspection,
    OnExit,
    ResumeIO,
    StartSpec,
)  # fmt: skip
from services.edge.drivers.container import folders
from services.edge.drivers.container.capturing import Capturing
from services.edge.drivers.container.deaths import Deaths, Sandbox, why
from services.edge.drivers.container.enforcing import Enforcing, together
from services.edge.drivers.container.engine import Engine
from services.edge.drivers.container.files import FilesOfAgent
from services.edge.drivers.container.folders import disk_of
from services.edge.drivers.container.ground import ground_of, lay
from services.edge.drivers.container.leftovers import Leftovers
from services.edge.drivers.container.limiting import LimitedDisks
from services.edge.drivers.container.pausing import NOT_OPEN, Pausing, pause_features
from services.edge.drivers.container.places import Place, data_of, full_disk, make, place_of
from services.edge.drivers.container.policies import PolicyOfContainers
from services.edge.drivers.container.pool import Pool
from services.edge.drivers.container.reaper import Reaper
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.shells import Root, Rooted, Shells, Steps, WarmShell
from services.edge.drivers.container.targets import target_of
from services.edge.drivers.container.wanted import check, limits, room_of
from services.edge.drivers.snapshotting import Captured
from services.edge.machine.cgroups import CgroupDriver, Groups
from services.edge.policy import seccomp
from services.edge.policy.plan import NO_INTERFACE, Plan
from services.edge.sensors.decoys import Spare
from shared.errors import Conflict, DsecError, SandboxDied, Unavailable

log = logging.getLogger(__name__)


class ContainerDriver(FilesOfAgent, PortsOfAgent, PolicyOfContainers, LimitedDisks, Leftovers):
    """See the module."""

    name = "container"

    def __init__(self, settings: ContainerSettings) -> None:
        self._settings = settings
        self._instance = secrets.token_hex(4)
        self._engine = Engine(settings, self._instance)
        self._reaper = Reaper(settings, self._engine)
        self._live: dict[str, Sandbox] = {}
        self._starting: set[str] = set()
        self._deaths = Deaths(settings, self._engine, self._live)
        self._enforcing = Enforcing(settings)
        self._features: Mapping[str, Feature] = {}
        self._shells: Shells | None = None
        self._pool: Pool[WarmShell] | None = None
        self._pausing: Pausing | None = None
        filters = platform.machine() in seccomp.NUMBERS
        self._disks = Disks(settings.disks_dir, settings.disks, kept=filters)
        self._capturing = Capturing(settings, self._disks, lambda: self.pausing.kind)
        self._late: asyncio.Task[None] | None = None

    # ---- what this node can do ----

    async def probe(self) -> BackendReport:
        try:
            version = await self._engine.version()
            cgroups = await asyncio.to_thread(CgroupDriver.probe)
            missing = [p for p in (self._settings.aether, self._settings.attach) if not p.exists()]
        except DsecError as err:
            return BackendReport(False, err.message)
        if missing:
            return BackendReport(False, f"{missing[0].name} is not built (make -C guest)")
        if (wrong := await asyncio.to_thread(self._disks.prove)) is not None:
            return BackendReport(False, wrong)
        disk = await asyncio.to_thread(self._disks.probe)
        yes = Feature(True)
        limited = Feature(True, f"cgroup {cgroups.mode}")
        features = {
            "exec": Feature(True, "agent"), "files": yes, "file_trees": yes, "sessions": yes,
            "pty": yes, "ports": yes, "routes": yes, "clear": yes,
            "memory_limit": limited, "cpu_limit": limited, "pids_limit": limited,
            "network_deny": Feature(True, NO_INTERFACE),
            "disk_limit": Feature(disk.works, disk.reason),
            "snapshot": Feature(cgroups.freezer is not None, "disk only"),
        }  # fmt: skip
        swap = self._pausing.swap.look() if self._pausing else NOT_OPEN
        features |= pause_features(cgroups, swap)
        features |= await asyncio.to_thread(self._enforcing.features)
        self._features = features
        return BackendReport(True, f"Docker Engine {version}", features)

    async def open(self, on_exit: OnExit) -> None:
        self._deaths.on_exit = on_exit
        s = self._settings
        for folder in (s.sandboxes_dir, s.shells_dir):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(lay, s.ground_dir)
        cgroups = await asyncio.to_thread(CgroupDriver.probe)
        self._shells = Shells(s, self._engine, cgroups, self._enforcing.egress)
        self._pausing = Pausing(s, self._shells, cgroups)
        await self._pausing.open()
        self._reaper.open()
        self._pool = Pool(
            self._make_shell, self._shells.drop, size=s.pool_size, most=s.pool_max,
            concurrency=s.refill_concurrency, retry_s=s.pool_retry_s,
        )  # fmt: skip
        self._pool.open()
        self._late = asyncio.create_task(self._sweep_late())

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
        alone = not self._live
        for sandbox in list(self._live.values()):
            sandbox.agent.close()
        self._live.clear()
        self._deaths.close()
        self._enforcing.close()
        if self._late is not None:
            self._late.cancel()
        if self._shells is not None:
            with contextlib.suppress(DsecError):
                await self._sweep_shells()
        await self._reaper.close()
        if self._pausing is not None:
            await self._pausing.close(alone=alone)
        self._capturing.close()
        await self._engine.close()
        if self._shells is not None:
            self._shells.close()

    @property
    def shells(self) -> Shells:
        if self._shells is None:
            raise Unavailable("the container driver is not open")
        return self._shells

    @property
    def pausing(self) -> Pausing:
        if self._pausing is None:
            raise Unavailable("the container driver is not open")
        return self._pausing

    # ---- life ----

    async def start(self, spec: StartSpec) -> Handle:
        check(spec)
        plan = await self._plan(spec)
        self._disks.check(room_of(spec))
        if spec.uid in self._live or spec.uid in self._starting:
            raise Conflict(f"sandbox {spec.uid} exists", field="uid")
        self._starting.add(spec.uid)
        try:
            return await self._start(spec, self._settings.sandboxes_dir / spec.uid, plan)
        except OSError as err:
            raise full_disk(err) from err
        finally:
            self._starting.discard(spec.uid)

    async def _start(self, spec: StartSpec, folder: Path, plan: Plan) -> Handle:
        place = place_of(folder)
        warm: WarmShell | None = None
        try:
            if room_of(spec) is not None:  # else it is made with what follows: each turn of
                # a thread waits for the interpreter, beside all other starts
                await self.shells.thread(lambda: make(place, spec, self._disks))
            warm = await self._take_shell()
            data = data_of(warm, spec, place.disk)
            steps = Steps()
            above = [self._capturing.folder(id) for id in spec.captures]
            ground = ground_of(self._settings.ground_dir, decoy=plan.watches)
            target = target_of(spec, data, agent=warm.agent, groups=warm.groups)
            attaching = self.shells.attach(
                warm, Root(spec.layers, place.disk.upper, above, ground), limits(spec),
                lambda: [spec.hostname, *self._noted(place, spec, data, plan, warm.decoy)],
                lambda: self._enforcing.mark(target, plan), steps,
            )  # fmt: skip
            rooted = asyncio.ensure_future(attaching)
            begun = self._enforcing.begin(target, plan, root=rooted, going=steps.going)
            await together(_answers(warm, rooted, steps), begun)
            enforced = {
                **rooted.result().enforced, **place.disk.enforcement, **plan.enforcement
            }  # fmt: skip
            handle = Handle(spec.uid, self.name, data, enforced)
            self._adopt(handle, spec, warm.agent, warm.groups)
            return handle
        except BaseException:
            self._enforcing.end(spec.uid)
            await asyncio.shield(self._undo(warm, place))
            raise
        finally:
            place.disk.close()

    def _noted(
        self, place: Place, spec: StartSpec, data: Mapping[str, Any], plan: Plan, spare: Spare
    ) -> list[str]:
        """What is laid over paths of a sandbox whose folder knows it now. Blocking. Raises as
        :func:`make` does."""
        if not place.made:
            make(place, spec, self._disks)
        folders.note(place.folder, data)
        return self._enforcing.guards(spec.uid, plan, spare)

    async def _make_shell(self) -> WarmShell:
        try:
            return await self.shells.make()
        except OSError as err:
            raise full_disk(err) from err

    async def _take_shell(self) -> WarmShell:
        if self._pool is None:
            raise Unavailable("the container driver is not open")
        try:
            async with asyncio.timeout(self._settings.start_s):
                return await self._pool.take()
        except TimeoutError:
            why = self._pool.last_error()
            raise Unavailable(
                f"no shell became ready: {why.message if why else 'the engine is busy'}"
            ) from why

    async def _undo(self, warm: WarmShell | None, place: Place) -> None:
        with contextlib.suppress(DsecError):
            if warm is not None:
                await self.shells.drop(warm)
        place.disk.close()
        if place.made:
            await self._remove_files(place.folder.name, None, disk=place.disk.note)

    def _adopt(self, handle: Handle, spec: StartSpec, agent: AgentClient, groups: Groups) -> None:
        defaults = Defaults(dict(spec.env), spec.workdir, spec.user)
        sandbox = Sandbox(spec.uid, handle, agent, defaults, groups, limits(spec))
        self._live[spec.uid] = sandbox
        self._deaths.watch(sandbox)

    async def recover(self, handle: Handle, spec: StartSpec) -> Handle | None:
        if handle.uid in self._live:
            return self._live[handle.uid].handle
        folder = self._settings.sandboxes_dir / handle.uid
        if not folder.exists():
            return None
        try:
            agent = await self.shells.reconnect(str(handle.data["name"]))
        except DsecError:
            if (await self._engine.ending(str(handle.data["container"]))).running:
                raise
            return None
        groups = Groups.of(handle.data["groups"])
        target = target_of(spec, handle.data, agent=agent, groups=groups)
        plan = await self._plan(spec)
        try:
            await self._enforcing.begin(target, plan, recovers=True)
        except BaseException:
            agent.close()
            raise
        self._adopt(handle, spec, agent, groups)
        return replace(handle, enforcement={**handle.enforcement, **plan.enforcement})

    async def inspect(self, handle: Handle) -> Inspection:
        sandbox = self._live.get(handle.uid)
        if sandbox is not None and not sandbox.agent.lost:
            return Inspection(True)
        ending = await self._engine.ending(str(handle.data["container"]))
        if ending.running:
            return Inspection(True)
        return Inspection(False, *why(ending))

    async def exec(self, handle: Handle, spec: ExecSpec, io: ExecIO) -> ExecOutcome:
        sandbox = self._sandbox(handle)
        try:
            spec = self._within_budget(handle, spec)
            return await run_command(sandbox.agent, spec, io, defaults=sandbox.defaults)
        except Unavailable as err:
            raise await self._deaths.explain(sandbox, err) from err

    async def resume_exec(
        self, handle: Handle, op_id: str, io: ResumeIO, *, stdin: bool = False
    ) -> ExecOutcome | None:
        sandbox = self._sandbox(handle)
        try:
            return await resume_command(sandbox.agent, op_id, io, stdin=stdin)
        except Unavailable as err:
            raise await self._deaths.explain(sandbox, err) from err

    async def commands(self, handle: Handle) -> int:
        return sum(not op.done for op in await self._sandbox(handle).agent.list())

    def let_go(self) -> None:
        for sandbox in self._live.values():
            sandbox.agent.leaving = True

    async def pause(self, handle: Handle) -> None:
        await self.pausing.pause(self._sandbox(handle))

    async def resume(self, handle: Handle) -> None:
        await self.pausing.resume(self._sandbox(handle))

    async def reclaim(self, handle: Handle) -> int:
        return await self.pausing.reclaim(self._sandbox(handle))

    async def clear(self, handle: Handle) -> None:
        await self.pausing.clear(self._sandbox(handle))

    async def capture(self, handle: Handle, id: str) -> Captured:
        sandbox, stop = self._sandbox(handle), threading.Event()
        try:
            return await self.shells.thread(
                lambda: self._capturing.take(sandbox, id, stop.is_set), cancel=stop.set,
                undo=lambda done: self._capturing.release(done.id),
                threads=self._capturing.threads,
            )  # fmt: skip
        except OSError as err:
            raise full_disk(err) from err

    async def release(self, id: str) -> None:
        await self.shells.thread(lambda: self._capturing.release(id))

    async def stop(self, handle: Handle, *, grace_s: float = 0.0) -> None:
        sandbox = self._live.pop(handle.uid, None)
        if sandbox is not None:
            sandbox.stopping = True
        self._enforcing.end(handle.uid)
        groups = Groups.of(handle.data["groups"])
        await self.pausing.leave(sandbox, groups, thaw=grace_s > 0)
        if grace_s > 0:
            await self.shells.terminate(groups, grace_s)
        await self._give_up_disk(handle)
        await self.shells.end(groups)
        if sandbox is not None:
            sandbox.agent.close()
        await self._remove_files(handle.uid, str(handle.data["name"]), disk=disk_of(handle.data))
        if "captures" in handle.data:
            await self.shells.thread(self._capturing.collect)
        await self._reaper.remove(str(handle.data["container"]))

    async def sweep(self, known: frozenset[str]) -> list[str]:
        keep = known | self._starting | set(self._live)
        metas = folders.noted(self._settings.sandboxes_dir)
        swept = [uid for uid in metas if uid not in keep]
        for uid in swept:
            await self._sweep_one(uid, metas[uid])
        await self._sweep_shells()
        await self.shells.thread(self._capturing.collect)
        return swept

    def _sandbox(self, handle: Handle) -> Sandbox:
        sandbox = self._live.get(handle.uid)
        if sandbox is None:
            raise SandboxDied(f"sandbox {handle.uid} does not run here", cause="runtime")
        return sandbox

    def _agent(self, handle: Handle) -> tuple[AgentClient, Defaults]:
        sandbox = self._sandbox(handle)
        return sandbox.agent, sandbox.defaults


async def _answers(warm: WarmShell, rooted: asyncio.Future[Rooted[Any]], steps: Steps) -> None:
    """Its agent does so in the root it now has."""
    await steps.there.wait()
    if rooted.done():
        rooted.result()
    await warm.agent.list()
