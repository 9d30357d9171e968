"""Warm shells: a container whose agent answers and whose workload groups exist.

Owns: making one, giving it a root, ending it. Does not own: how many there are (the
pool), what runs in it. A shell belongs to no sandbox until it is attached; then it has
that sandbox's root and never another.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from services.edge.agent.client import AgentClient
from services.edge.drivers.base import Layer, Usage
from services.edge.drivers.container.engine import SOCKET, Engine, Shell
from services.edge.drivers.container.helping import Helper
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.egress.manager import Egress
from services.edge.layers.mounts import LAYERS_MAX, LayerMounts, Upper, compose, lower_count
from services.edge.machine.cgroups import CgroupDriver, Groups, Limits, close_fds, remove_parent
from services.edge.sensors import decoys
from shared.errors import InvalidRequest, Unavailable

T = TypeVar("T")
EXIT_IMAGE, EXIT_POLICY = 2, 3
"""The attaching helper's exit codes for what is the image's own fault, and for paths that
a policy protects and that are not there."""


@dataclass(slots=True)
class WarmShell:
    """A running shell with an open connection to its agent, the helper that is to give it its
    root, and the decoy that a sandbox whose paths are watched would have."""

    shell: Shell
    groups: Groups
    agent: AgentClient
    helper: Helper
    decoy: decoys.Spare

    @property
    def alive(self) -> bool:
        return not self.agent.lost


@dataclass(frozen=True, slots=True)
class Root:
    """What a root is made of: ``layers`` on the ``ground``, and the folders ``above`` them,
    bottom to top. A root that has as many layers as can be does without ground."""

    layers: Sequence[Layer]
    upper: Upper
    above: Sequence[Path]
    ground: Path

    @property
    def below(self) -> Sequence[Path]:
        return (self.ground,) if len(self.layers) + len(self.above) < LAYERS_MAX else ()

    @property
    def count(self) -> int:
        """Of all its lower layers."""
        return len(self.layers) + len(self.above) + len(self.below)


@dataclass(frozen=True, slots=True)
class Steps:
    """How far an attaching is: ``going`` from when this process only waits for the helper
    (until then others would be in its way), ``there`` when the shell has its root. Both are
    set when it has ended, however."""

    going: asyncio.Event = field(default_factory=asyncio.Event)
    there: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Rooted(Generic[T]):
    """What enforces the limits of a shell that has its root, and what was ``found`` there."""

    enforced: dict[str, str]
    found: T


class Shells:
    """Makes, attaches and ends shells of one node."""

    def __init__(
        self, settings: ContainerSettings, engine: Engine, cgroups: CgroupDriver, egress: Egress
    ) -> None:
        self._settings = settings
        self._engine, self._egress = engine, egress
        self._cgroups = cgroups
        self._mounts = LayerMounts(idle_max=settings.idle_layers)
        self._threads = ThreadPoolExecutor(settings.kernel_threads, "kernel")

    async def thread(
        self, work: Callable[[], T], *, undo: Callable[[T], object] | None = None,
        cancel: Callable[[], object] | None = None, threads: ThreadPoolExecutor | None = None,
    ) -> T:  # fmt: skip
        """Runs blocking kernel work off the loop. It is never left half-way: a cancelled
        caller goes on when the work has ended (``cancel`` tells it to) and ``undo`` took
        its result back. ``threads``: others than those for short work."""
        job = asyncio.get_running_loop().run_in_executor(threads or self._threads, work)
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            while not job.done():
                await asyncio.wait({job})
            if undo is not None and job.exception() is None:
                undo(job.result())
            raise

    def socket(self, name: str) -> Path:
        return self._settings.shells_dir / name / SOCKET

    async def make(self) -> WarmShell:
        """A new shell, ready: its agent answered with this shell's own name."""
        name = f"dsec-{self._settings.node}-{secrets.token_hex(8)}"
        folder = self._settings.shells_dir / name
        folder.mkdir(parents=True, mode=0o700)
        shell: Shell | None = None
        groups: Groups | None = None
        helper: Helper | None = None
        try:
            shell = await self._engine.create_shell(name, folder)
            found = shell
            made = groups = await self.thread(lambda: self._cgroups.of_process(found.pid, name))
            agent = await self._greet(name, groups)
            helper = await self.thread(lambda: self._ready(found, made), undo=Helper.close)
            decoy = await self.thread(
                lambda: decoys.make_spare(folder / decoys.FOLDER), undo=decoys.Spare.close
            )
            return WarmShell(shell, groups, agent, helper, decoy)
        except BaseException:
            if helper is not None:
                helper.close()
            await asyncio.shield(self._undo(name, shell, groups))
            raise

    async def _greet(self, name: str, groups: Groups) -> AgentClient:
        fds = await self.thread(lambda: self._cgroups.make_work(groups), undo=close_fds)
        try:
            return await AgentClient.connect(
                self.socket(name), generation=name, cgroups=fds, wait=True,
                deadline_s=self._settings.agent_s,
            )  # fmt: skip
        finally:
            close_fds(fds)

    async def _undo(self, name: str, shell: Shell | None, groups: Groups | None) -> None:
        if shell is not None:
            self._egress.unprepare(shell.id)
        with contextlib.suppress(Unavailable):
            if groups is not None:
                await self.end(groups)
            if shell is not None:
                await self._engine.remove(shell.id)
            else:  # cancelled while the engine was at it: its name tells
                await self._engine.remove(name)
        await self.thread(lambda: shutil.rmtree(self._settings.shells_dir / name, True))

    async def attach(
        self, warm: WarmShell, root: Root, limits: Limits, names: Callable[[], Sequence[str]],
        after: Callable[[], T], steps: Steps,
    ) -> Rooted[T]:  # fmt: skip
        """Gives the shell its root and its limits. ``names``, asked first and off the loop:
        the host's name, then what is laid over paths of the root; ``after`` is done there
        last, in a shell that has its root."""
        loop = asyncio.get_running_loop()

        def come(step: asyncio.Event) -> None:
            loop.call_soon_threadsafe(step.set)

        def work() -> Rooted[T]:
            going = partial(come, steps.going)
            enforced = self._attach(warm, root, limits, names(), going)
            come(steps.there)
            _check_layers(warm.shell.pid, root.count)
            return Rooted(enforced, after())

        try:
            return await self.thread(work)
        finally:
            steps.going.set()
            steps.there.set()

    def _attach(
        self, warm: WarmShell, wanted: Root, limits: Limits, names: Sequence[str],
        goes: Callable[[], None],
    ) -> dict[str, str]:  # fmt: skip
        wanted.upper.make()
        enforced = self._cgroups.limit(warm.groups, limits)
        root = compose(
            self._mounts, wanted.layers, wanted.upper, above=wanted.above, below=wanted.below
        )
        try:
            self._help(warm, names, root, goes)
        finally:
            os.close(root)
        return enforced

    def _ready(self, shell: Shell, groups: Groups) -> Helper:
        """What needs no sandbox, ahead of one."""
        pid = os.pidfd_open(shell.pid)
        try:
            if shell.id not in Path(f"/proc/{shell.pid}/cgroup").read_text():
                raise Unavailable("the shell's process is not the shell's", cause="runtime")
            helper = Helper(
                self._settings.attach, [str(pid)], (pid,), within_s=self._settings.attach_s
            )
        except OSError as err:
            raise Unavailable(f"a shell is not readied: {err}", cause="runtime") from err
        finally:
            os.close(pid)
        self._egress.prepare(shell.pid, shell.id, Path(groups.v2 or "").parent)
        return helper

    def _help(
        self, warm: WarmShell, words: Sequence[str], root: int, goes: Callable[[], None]
    ) -> None:
        """Has the helper attach a root; from ``goes`` on this process only waits for it."""
        try:
            within_s = self._settings.attach_s
            ended = warm.helper.run(words, (root,), within_s=within_s, goes=goes)
        except OSError as err:
            raise Unavailable(f"the root cannot be attached: {err}", cause="runtime") from err
        if ended.code == EXIT_IMAGE:
            raise InvalidRequest(ended.said, field="container_image", cause="image")
        if ended.code == EXIT_POLICY:
            raise InvalidRequest(ended.said, field="policy.files", cause="invalid")
        if ended.code:
            raise Unavailable(ended.said or "the root cannot be attached", cause="runtime")

    async def reconnect(self, name: str) -> AgentClient:
        """A new connection to the agent of a running shell."""
        return await AgentClient.connect(
            self.socket(name), generation=name, deadline_s=self._settings.agent_s
        )

    async def end(self, groups: Groups) -> None:
        """Kills all processes of a container and removes its groups; its mounts go with
        its last process."""

        def work() -> None:
            self._cgroups.kill(groups)
            self._cgroups.remove(groups)

        await self.thread(work)

    async def end_process(self, pid: int, name: str) -> None:
        """Like :meth:`end`, for a container known only by its first process."""
        try:
            groups = await self.thread(lambda: self._cgroups.of_process(pid, name))
        except OSError:
            return  # it ended meanwhile
        await self.end(groups)

    async def terminate(self, groups: Groups, grace_s: float) -> None:
        """Asks every command to end and waits up to ``grace_s`` for it."""
        await self.thread(lambda: self._cgroups.terminate(groups, grace_s))

    async def usage(self, groups: Groups) -> Usage:
        return await self.thread(lambda: self._cgroups.usage(groups))

    async def drop(self, warm: WarmShell) -> None:
        """Ends a shell that no sandbox has."""
        warm.agent.close()
        warm.decoy.close()
        await self.thread(warm.helper.close)
        await self._undo(warm.shell.name, warm.shell, warm.groups)

    def close(self) -> None:
        """Lets go of the layers; nothing is left where no sandbox lives on."""
        remove_parent(self._settings.cgroup_parent)
        self._mounts.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _check_layers(pid: int, asked: int) -> None:
    if (found := lower_count(pid)) != asked:
        raise Unavailable(
            f"the root has {found} of {asked} layers", field="layers", cause="image"
        )
