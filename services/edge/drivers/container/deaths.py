"""How sandboxes of this process die, and what is told of it.

Owns: noticing that an agent's connection ended, finding out why, telling it once. Does
not own: stopping (the driver), which sandboxes there are.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from services.edge.agent.client import AgentClient
from services.edge.agent.commands import Defaults
from services.edge.drivers.base import Exited, Handle, OnExit
from services.edge.drivers.container.engine import Ending, Engine
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.machine.cgroups import Groups, Limits
from shared.errors import DsecError, SandboxDied, Unavailable


@dataclass(slots=True)
class Sandbox:
    """A sandbox this process holds the connection of."""

    uid: str
    handle: Handle
    agent: AgentClient
    defaults: Defaults
    groups: Groups
    limits: Limits
    stopping: bool = False
    paused: bool = False
    unsettled: bool = True  # an edge that was killed may have left its memory settings lowered
    prefetch: asyncio.Task[None] | None = None
    death: asyncio.Future[tuple[str, str]] | None = None


class Deaths:
    """Watches the sandboxes of ``live`` (by uid) and takes the dead ones out."""

    def __init__(
        self, settings: ContainerSettings, engine: Engine, live: dict[str, Sandbox]
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._live = live
        self._tasks: set[asyncio.Task[None]] = set()
        self.on_exit: OnExit | None = None

    def watch(self, sandbox: Sandbox) -> None:
        """From here on its death is noticed."""
        sandbox.agent.on_lost(lambda: self._lost(sandbox))

    def close(self) -> None:
        """Tells nothing any more."""
        for task in self._tasks:
            task.cancel()

    def _lost(self, sandbox: Sandbox) -> None:
        if sandbox.stopping or self._live.get(sandbox.uid) is not sandbox:
            return
        task = asyncio.ensure_future(self._died(sandbox))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _died(self, sandbox: Sandbox) -> None:
        cause, message = await self._death(sandbox)
        if sandbox.stopping or self._live.get(sandbox.uid) is not sandbox:
            return
        del self._live[sandbox.uid]
        if self.on_exit is not None:
            await self.on_exit(Exited(sandbox.uid, cause, message))

    async def explain(self, sandbox: Sandbox, err: Unavailable) -> DsecError:
        """A lost connection under a command is the sandbox's death, if it died."""
        if not sandbox.agent.lost:
            return err
        if sandbox.stopping:
            return SandboxDied("the sandbox was stopped", cause="cancelled")
        cause, message = await self._death(sandbox)
        return SandboxDied(message, cause=cause)

    async def _death(self, sandbox: Sandbox) -> tuple[str, str]:
        """Cause and message of a death, found out once for all who ask."""
        if sandbox.death is None:
            sandbox.death = asyncio.ensure_future(self._find_out(sandbox))
        return await asyncio.shield(sandbox.death)

    async def _find_out(self, sandbox: Sandbox) -> tuple[str, str]:
        container = str(sandbox.handle.data["container"])
        with contextlib.suppress(TimeoutError, DsecError):
            async with asyncio.timeout(self._settings.death_s):
                ending = await self._engine.ending(container)
                while ending.running:  # the engine learns of it a little later
                    await asyncio.sleep(0.02)
                    ending = await self._engine.ending(container)
                return why(ending)
        return "runtime", "the connection to the sandbox's agent ended"


def why(ending: Ending) -> tuple[str, str]:
    """Cause and message of how a container ended."""
    cause = "oom" if ending.oom else "runtime"
    what = f"the sandbox's agent ended with exit code {ending.exit_code}"
    return cause, f"{what}: {ending.last_words}" if ending.last_words else what
