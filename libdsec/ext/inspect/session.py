"""One connection for all samples of an evaluation, and what was made over it.

Owns: opening once an event loop, which sandboxes are alive, stopping them. Does not
own: one sandbox's commands (:mod:`libdsec.ext.inspect.environment`). The client is made
with ``keep``: whether sandboxes outlive the evaluation is for Inspect to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from weakref import WeakKeyDictionary

from libdsec.args import DSecRunArgs
from libdsec.client import DSecClient
from libdsec.errors import DSecError, NotFound
from libdsec.ext.inspect.config import DSecSandboxConfig
from libdsec.sandbox import Sandbox

log = logging.getLogger(__name__)

LABEL = "inspect_ai"
TASK_LABEL = "inspect_task"
MAX_LABEL_CHARS = 255
RETRY_S = 1.0
"""Wait before a create that had no room is asked for again."""
STOPPED = ("stopped", "failed", "rejected", "lost")


class Session:
    """The connection of one event loop."""

    def __init__(self) -> None:
        self._client = DSecClient(keep=True)
        self._opening = asyncio.Lock()
        self._alive: dict[str, Sandbox] = {}
        self._tasks = 0

    async def client(self) -> DSecClient:
        """The open client."""
        async with self._opening:
            return await self._client.open()

    def begin_task(self) -> None:
        """One more task uses it."""
        self._tasks += 1

    async def end_task(self, *, cleanup: bool) -> list[str]:
        """One less; the last one's end stops what is left (or not), closes, and
        returns the ids of what goes on."""
        self._tasks = max(self._tasks - 1, 0)
        if self._tasks:
            return []
        if cleanup:
            await self.stop(list(self._alive.values()))
        left = [sandbox.id for sandbox in self._alive.values()]
        self._alive.clear()
        await self._client.close()
        return left

    async def create(self, config: DSecSandboxConfig, task_name: str) -> dict[str, Sandbox]:
        """Name → sandbox, all ready, in one request. Nothing is left where one fails."""
        labels = {LABEL: "sandbox", TASK_LABEL: task_name[:MAX_LABEL_CHARS]}
        named = config.named()
        args = [one.run_args(labels) for one in named.values()]
        end = time.monotonic() + config.create_timeout_s
        while True:
            left_s = max(end - time.monotonic(), RETRY_S)
            made = await self._create(args, left_s)
            if not isinstance(made, DSecError):
                return dict(zip(named, made, strict=True))
            wait_s = made.retry_after_s or RETRY_S
            if not made.retryable or time.monotonic() + wait_s >= end:
                raise made
            await asyncio.sleep(wait_s)

    async def _create(self, args: list[DSecRunArgs], timeout_s: float) -> list[Sandbox] | DSecError:
        client = await self.client()
        results = await client.create_many(args, timeout=timeout_s)
        made = [r for r in results if isinstance(r, Sandbox)]
        self._alive |= {sandbox.uid: sandbox for sandbox in made}
        errors = [r for r in results if isinstance(r, DSecError)]
        if not errors:
            return made
        await self.stop(made)
        return errors[0]

    async def stop(self, sandboxes: Iterable[Sandbox]) -> None:
        """Stops them; what cannot be stopped now is tried again at the task's end: a
        sample that is scored is not lost to its cleanup."""
        many = list(sandboxes)
        if many:
            try:
                stopped = await (await self.client()).stop_many(many)
            except DSecError as exc:
                log.warning("%d dsec sandboxes are not stopped yet: %s", len(many), exc)
                return
            for uid, outcome in stopped.items():
                if isinstance(outcome, str | NotFound):
                    self._alive.pop(uid, None)
        if not self._tasks and not self._alive:
            await self._client.close()

    async def missing_images(self, config: DSecSandboxConfig) -> list[str]:
        """Names of images that nobody registered."""
        wanted = {_tagged(i) for one in config.named().values() for i in one.images}
        known = {_tagged(image.name) for image in await (await self.client()).images.list()}
        return sorted(wanted - known)


_sessions: WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()


def session() -> Session:
    """The running event loop's."""
    loop = asyncio.get_running_loop()
    if loop not in _sessions:
        _sessions[loop] = Session()
    return _sessions[loop]


async def stop_left_behind(id: str | None) -> Mapping[str, DSecError | str]:
    """Stops one sandbox, or all that evaluations of this project left: uid → outcome."""
    async with DSecClient(keep=True) as client:
        if id is not None:
            return await client.stop_many([id])
        found = client.list(labels={LABEL: "sandbox"})
        alive = [sandbox async for sandbox in found if sandbox.state not in STOPPED]
        return await client.stop_many(alive) if alive else {}


def _tagged(name: str) -> str:
    return name if ":" in name else f"{name}:latest"


async def working_directory(sandbox: Sandbox, wanted: str | None) -> str:
    """``wanted``, made where it is missing, or where the sandbox's commands begin."""
    if wanted is None:
        with contextlib.suppress(DSecError):
            found = await sandbox.exec("pwd")
            return found.text.removesuffix("\n") if found.ok else "/"
        return "/"
    if not await sandbox.files.exists(wanted):
        try:
            await sandbox.files.mkdir(wanted)
        except PermissionError:
            await sandbox.files.mkdir(wanted, mode=0o777, user="root")
    return wanted
