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
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from services.edge.agent.client import AgentClient
from services.edge.drivers.base import Layer, Usage
from services.edge.drivers.container.engine import SOCKET, Engine, Shell
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.egress.manager import Egress
from services.edge.layers.mounts import LayerMounts, Upper, compose, lower_count
from services.edge.machine.cgroups import CgroupDriver, Groups, Limits, close_fds, remove_parent
from services.edge.sensors import decoys
from shared.errors import InvalidRequest, Unavailable

T = TypeVar("T")
EXIT_IMAGE, EXIT_POLICY = 2, 3
"""The attaching helper's exit codes for what is the image's own fault, and for paths that
a policy protects and that are not there."""


@dataclass(slots=True)
class WarmShell:
    """A running shell with an open connection to its agent, and the decoy that a sandbox
    whose paths are watched would have."""

    shell: Shell
    groups: Groups
    agent: AgentClient
    decoy: decoys.Spare

    @property
    def alive(self) -> bool:
        return not self.agent.lost


@dataclass(frozen=True, slots=True)
class Root:
    """What a root is made of: ``layers`` and the folders ``above`` them, bottom to top."""

    layers: Sequence[Layer]
    upper: Upper
    above: Sequence[Path] = ()


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
        try:
            shell = await self._engine.create_shell(name, folder)
            found = shell
            groups = await self.thread(lambda: self._cgroups.of_process(found.pid, name))
            agent = await self._greet(name, groups)
            await self.thread(lambda: self._egress.prepare(found.pid, found.id))
            decoy = await self.thread(
                lambda: decoys.make_spare(folder / decoys.FOLDER), undo=decoys.Spare.close
            )
            return WarmShell(shell, groups, agent, decoy)
        except BaseException:
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
        going: asyncio.Event,
    ) -> dict[str, str]:  # fmt: skip
        """Gives the shell its root and its limits; returns what enforces them. ``names``,
        asked first and off the loop: the host's name, then what is laid over paths of the
        root. From ``going`` on this process only waits for the helper: until then others
        would be in the way."""
        loop = asyncio.get_running_loop()

        def goes() -> None:
            loop.call_soon_threadsafe(going.set)

        def work() -> dict[str, str]:
            return self._attach(warm, root, limits, names(), goes)

        try:
            return await self.thread(work)
        finally:
            going.set()

    def _attach(
        self, warm: WarmShell, wanted: Root, limits: Limits, names: Sequence[str],
        goes: Callable[[], None],
    ) -> dict[str, str]:  # fmt: skip
        wanted.upper.make()
        enforced = self._cgroups.limit(warm.groups, limits)
        root = compose(self._mounts, wanted.layers, wanted.upper, above=wanted.above)
        try:
            self._enter(warm.shell, root, names, goes)
        finally:
            os.close(root)
        found, asked = lower_count(warm.shell.pid), len(wanted.layers) + len(wanted.above)
        if found != asked:
            raise Unavailable(
                f"the root has {found} of {asked} layers", field="layers", cause="image"
            )
        return enforced

    def _enter(
        self, shell: Shell, root: int, names: Sequence[str], goes: Callable[[], None]
    ) -> None:
        pid = os.pidfd_open(shell.pid)
        try:
            if shell.id not in Path(f"/proc/{shell.pid}/cgroup").read_text():
                raise Unavailable("the shell's process is not the shell's", cause="runtime")
            helper = subprocess.Popen(
                [str(self._settings.attach), str(pid), str(root), *names],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                pass_fds=(pid, root), env={},
            )  # fmt: skip
            with helper:
                goes()
                try:
                    _, error = helper.communicate(timeout=self._settings.attach_s)
                except BaseException:
                    helper.kill()
                    raise
        except (OSError, subprocess.TimeoutExpired) as err:
            raise Unavailable(f"the root cannot be attached: {err}", cause="runtime") from err
        finally:
            os.close(pid)
        if helper.returncode:
            said = error[:1024].decode(errors="replace").strip()
            if helper.returncode == EXIT_IMAGE:
                raise InvalidRequest(said, field="container_image", cause="image")
            if helper.returncode == EXIT_POLICY:
                raise InvalidRequest(said, field="policy.files", cause="invalid")
            raise Unavailable(said or "the root cannot be attached", cause="runtime")

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
        await self._undo(warm.shell.name, warm.shell, warm.groups)

    def close(self) -> None:
        """Lets go of the layers; nothing is left where no sandbox lives on."""
        remove_parent(self._settings.cgroup_parent)
        self._mounts.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
