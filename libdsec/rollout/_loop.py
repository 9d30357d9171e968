"""Rollouts of a run, wherever their loop runs.

Owns: what a loop is handed, its sandboxes, how its end is told. Does not own: where that
is told (a file of the worker, a list of the trainer).

Sandboxes have the names that the loop gives them, and calls on them are a script
(:mod:`libdsec.forward`): a loop that is run again, by a worker that was killed or a trainer
that came back, gets the sandboxes it had and the results of what it did in them, also those
of a rollout that had ended. It must ask for the same again where it was answered the same.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec

from libdsec import _ids
from libdsec._asking import Asked
from libdsec._create import CREATE_S
from libdsec._portal import on_portal
from libdsec.args import DSecRunArgs, Seconds
from libdsec.client import DSecClient
from libdsec.errors import DSecError, InvalidRequest, SandboxDied
from libdsec.forward import FastForward
from libdsec.rollout._messages import Event, Kind, Result, noted, result_of
from libdsec.sandbox import Sandbox

log = logging.getLogger("libdsec")

AT_ONCE = 64
"""Rollouts of one run side by side."""
TRACE_CHARS = 4_000

Tell = Callable[[Kind, int, Any, bool], None]
"""Takes kind, rollout, data, is_infra."""


class Rollout:
    """What a loop is handed: ``prompt``, which of its group it is (``sample``), a
    ``client``. ``index`` counts all rollouts of the run."""

    def __init__(
        self, client: DSecClient, run_id: str, index: int, *, prompt: Any, sample: int,
        tell: Tell, routes: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.client = client
        self.run_id = run_id
        self.index = index
        self.prompt = prompt
        self.sample = sample
        self._tell = tell
        self._routes = dict(routes)
        self._sandboxes: dict[str, FastForward] = {}

    def __repr__(self) -> str:
        return f"Rollout({self.run_id!r}, {self.index})"

    async def sandbox(
        self, args: DSecRunArgs, *, name: str = "agent", timeout: Seconds = CREATE_S
    ) -> FastForward:
        """The rollout's sandbox ``name``: made at the first call, the same one at every
        other, with what was done in it (:meth:`Sandbox.fast_forward`). It ends with the
        rollout."""
        if name not in self._sandboxes:
            made = await self._made(replace(args, job=self.run_id), name, timeout)
            self._sandboxes[name] = await made.fast_forward().__aenter__()
        return self._sandboxes[name]

    async def ask(self, question: Any, asked: Asked, *, sandbox: str = "agent") -> Any:
        """What a model says: ``asked(question)``, called once; a loop that runs again gets
        what it said then (:meth:`FastForward.ask`), at this place among the calls on the
        rollout's ``sandbox``, which is to be there. Raises ``InvalidRequest`` where it is
        not."""
        if sandbox not in self._sandboxes:
            raise InvalidRequest(
                f"answers are kept with the rollout's sandbox {sandbox!r}: it is not made yet",
                field="sandbox",
            )
        return await self._sandboxes[sandbox].ask(question, asked)

    async def _made(self, args: DSecRunArgs, name: str, timeout: Seconds) -> Sandbox:
        """Where it had ended in a life of the loop before, its log is still there."""
        request_id = _ids.named(self.client.project, self.run_id, str(self.index), name)
        try:
            return await self.client.create(args, timeout=timeout, request_id=request_id)
        except SandboxDied:
            found = await self.client.get(request_id)
            if found.state != "stopped":
                raise
            return found

    def address(self, route: str) -> tuple[str, int]:
        """Where a route of the worker is reached: host and port. Raises ``KeyError``
        for one that the run has not."""
        return "127.0.0.1", self._routes[route]

    def tell(self, data: Any) -> None:
        """Tells whoever listens to the run's events, now or later. ``data`` is JSON."""
        self._tell("told", self.index, data, False)

    async def _end(self) -> None:
        for sandbox in self._sandboxes.values():
            try:
                await sandbox.stop()
            except DSecError as exc:  # the run's own end stops what is left
                log.warning("%r: its sandbox is not stopped yet: %s", self, exc)


Loop = Callable[[Rollout], Awaitable[Any]]
"""In the synchronous face, and in workers, a plain function too."""


async def run_all(
    client: DSecClient, run_id: str, loop: Loop, *, prompts: Sequence[Any], group_size: int,
    at_once: int, tell: Tell, finished: Collection[int] = (),
    routes: Mapping[str, int] | None = None,
) -> None:  # fmt: skip
    """All rollouts that are not ``finished``, at most ``at_once`` side by side."""
    slots = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with slots:
            prompt, sample = divmod(index, group_size)
            rollout = Rollout(
                client, run_id, index, prompt=prompts[prompt], sample=sample, tell=tell,
                routes=routes or {},
            )  # fmt: skip
            await _one(rollout, loop, tell)

    todo = [i for i in range(len(prompts) * group_size) if i not in finished]
    await asyncio.gather(*(one(index) for index in todo))
    tell("over", -1, None, False)


async def _run(loop: Loop, rollout: Rollout) -> Any:
    """A plain function gets a thread, and the synchronous face of its rollout: where that
    runs on this loop."""
    if inspect.iscoroutinefunction(loop) or not on_portal():
        return await loop(rollout)
    import libdsec.sync  # registers the faces  # noqa: F401
    from libdsec._sync_face import wrap

    pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, loop, wrap(rollout))
    finally:
        pool.shutdown(wait=False)


async def _one(rollout: Rollout, loop: Loop, tell: Tell) -> None:
    tell("begun", rollout.index, None, False)
    try:
        value = await _run(loop, rollout)
        msgspec.json.encode(value)  # what is no JSON is the loop's mistake, said as such
    except DSecError as exc:
        tell("failed", rollout.index, f"{type(exc).__name__}: {exc}", exc.is_infra)
    except Exception:
        tell("failed", rollout.index, traceback.format_exc()[-TRACE_CHARS:], False)
    else:
        tell("result", rollout.index, value, False)
    await rollout._end()


async def here(
    client: DSecClient, run_id: str, *, loop: Loop, prompts: Sequence[Any], group_size: int = 1,
    at_once: int = AT_ONCE, routes: Mapping[str, int] | None = None,
) -> list[Result]:  # fmt: skip
    """The same loop in this process, as the job ``run_id``: results in the order of the
    rollouts. A process that runs it again, after a death of the first, gets the sandboxes
    it had and the results of all that was done in them, and goes on from there. ``routes``:
    name → port on this machine."""
    results: dict[int, Result] = {}

    def tell(kind: Kind, index: int, data: Any, is_infra: bool) -> None:
        event = Event(0, 0.0, kind, index, data, is_infra)
        if (result := result_of(event, group_size)) is not None:
            results[index] = noted(result)

    async with client.job(run_id) as job:
        await run_all(
            client, run_id, loop, prompts=prompts, group_size=group_size, at_once=at_once,
            tell=tell, routes=routes,
        )  # fmt: skip
        await job.stop()
    return [results[index] for index in sorted(results)]
