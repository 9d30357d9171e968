"""Runs as their trainer sees them: submitted, found again, listened to, ended.

Owns: the worker container with its identity, reading its diary. Does not own: the loop,
which runs without us.

Everything here may be repeated: names are made from the run's id, so a trainer that died
anywhere in :func:`submit` submits again, or attaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from libdsec import _ids
from libdsec.args import DSecContainerRunArgs, Seconds
from libdsec.client import DSecClient
from libdsec.errors import Conflict, FileNotFound, InternalError, InvalidRequest, NotFound
from libdsec.jobs import LIVE
from libdsec.rollout._loop import AT_ONCE
from libdsec.rollout._messages import (
    CREDENTIALS,
    DIARY,
    HOME,
    LOG,
    LOOP,
    PID,
    PLAN,
    Event,
    Plan,
    Result,
    noted,
    result_of,
)
from libdsec.sandbox import Sandbox

BUS, BUS_PORT = "bus", 4222
"""The route by which a worker reaches the system, and its port in the container."""
FIRST_PORT = 8000
GRANTS = (
    "sandbox.create", "sandbox.exec", "sandbox.files", "sandbox.connect", "sandbox.get",
    "sandbox.list", "sandbox.stop", "sandbox.pause", "sandbox.resume", "sandbox.set_timeout",
    "sandbox.trajectory",
)  # fmt: skip
"""What a worker's key may do, in the project of its run alone; its maker holds all of it."""
ROLE, GROUP = {"dsec-rollout": "worker"}, "dsec-rollout-group"
"""Labels of a worker: what it is, how many rollouts a prompt has."""
LOOK_MIN_S, LOOK_MAX_S = 0.1, 1.0
"""Waits between looks at the diary."""
ALIVE_S = 5.0
"""How long nothing new may come until it is asked whether the worker still runs."""
CREATE_S = 120.0
STEP_S = 60.0
READ_BYTES = 1 << 20
REMOVE_TRIES = 60
RUN_S = 86_400.0

LoopSource = str | Callable[..., Any]
"""``path.py:function``, or a function at the top of its module."""


class Run:
    """A run, found by its id. ``project``: the one made for it. ``async with`` closes
    the connection; the run goes on."""

    def __init__(self, client: DSecClient, run_id: str, worker: Sandbox, *, parent: str) -> None:
        self._client = client
        self._parent = parent
        self.run_id = run_id
        self.worker = worker

    def __repr__(self) -> str:
        return f"Run({self.run_id!r}, worker={self.worker.id!r})"

    @property
    def project(self) -> str:
        """The run's own project."""
        return self._client.project

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends this connection. The run goes on. Idempotent."""
        await self._client.close()

    async def events(self, *, after: int = -1) -> AsyncIterator[Event]:
        """What happened since the event with number ``after``, and what happens, to the
        end of the run. A paused run stays paused and is waited for. Raises
        ``SandboxDied`` where the worker's container ended, ``InternalError`` where its
        program did."""
        wait_s, offset, quiet_s = LOOK_MIN_S, 0, 0.0
        while True:
            ended = quiet_s > ALIVE_S and not await self._lives()
            data = await self._read(offset)
            if ended and not data:
                raise await self._end()
            offset += len(data)
            for line in data.splitlines():
                event = msgspec.json.decode(line, type=Event)
                if event.seq > after:
                    yield event
                if event.kind == "over":
                    return
            wait_s = LOOK_MIN_S if data else min(LOOK_MAX_S, wait_s * 2)
            quiet_s = 0.0 if data or quiet_s > ALIVE_S else quiet_s + wait_s
            if not data:
                await asyncio.sleep(wait_s)

    async def _read(self, offset: int) -> bytes:
        """Whole lines. Half a line is left there: a worker that is started again takes the
        half of one that was killed away, and writes another in its place."""
        if await self._is_paused():
            return b""
        length, data = READ_BYTES, b""
        with contextlib.suppress(FileNotFound):  # it has not begun
            while True:
                data = await self.worker.files.read(
                    DIARY, offset=offset, length=length, user="root"
                )
                if b"\n" in data or len(data) < length:
                    break
                length *= 2
        whole, newline, _ = data.rpartition(b"\n")
        return whole + newline

    async def _is_paused(self) -> bool:
        """Asks without waking it."""
        found = await self._client.get(self.worker.uid)
        return found.state in ("pausing", "paused")

    async def _lives(self) -> bool:
        if await self._is_paused():
            return True
        look = f'kill -0 "$(cat {PID})"'
        return (await self.worker.exec(look, user="root", timeout=STEP_S)).ok

    async def _end(self) -> InternalError:
        log = await self.worker.exec(f"tail -c 2000 {LOG}", user="root", timeout=STEP_S)
        return InternalError(f"the worker of run {self.run_id} ended: {log.text}")

    async def results(self) -> list[Result]:
        """How all rollouts ended, in their order; waits for the run's end."""
        group_size = int(self.worker.labels[GROUP])  # asking the worker would wake it
        found: dict[int, Result] = {}
        async for event in self.events():
            if (result := result_of(event, group_size)) is not None:
                found[result.index] = noted(result)
        return [found[index] for index in sorted(found)]

    async def pause(self) -> None:
        """Pauses the worker, so that it asks for nothing that would wake them, and then all
        its sandboxes in one request."""
        await self.worker.pause()
        await self._client.jobs.pause(self.run_id)

    async def resume(self) -> None:
        """Lets all of it go on."""
        await self._client.jobs.resume(self.run_id)

    async def stop(self) -> None:
        """Ends the worker and all its sandboxes, takes its key away and removes the
        run's project: nothing of the run is left."""
        await self._client.jobs.stop(self.run_id)
        await _revoke(self._client)
        async with _in_project(self._client, self._parent) as above:
            await _removed(above, self.project)


async def _removed(client: DSecClient, project: str) -> None:
    """Without the project. Sandboxes that were still ending are waited for."""
    for left in reversed(range(REMOVE_TRIES)):
        try:
            return await client.projects.delete(project)
        except NotFound:
            return
        except Conflict:
            if not left:
                raise
            await asyncio.sleep(LOOK_MAX_S)


def _in_project(client: DSecClient, project: str) -> DSecClient:
    """Another connection of the same principal."""
    known = client._config
    return DSecClient(url=known.url, api_key=known.api_key, project=project, keep=True)


def _project_of(client: DSecClient, run_id: str) -> str:
    if not isinstance(run_id, str) or not 1 <= len(run_id) <= 128:
        raise InvalidRequest("a run's id has 1 to 128 characters", field="run_id")
    return f"run-{_ids.named(client.project, run_id)}"


async def submit(
    client: DSecClient,
    run_id: str,
    *,
    loop: LoopSource,
    prompts: Sequence[Any],
    group_size: int = 1,
    container_image: str | None = None,
    args: DSecContainerRunArgs | None = None,
    at_once: int = AT_ONCE,
    routes: Sequence[str] = (),
    grants: Sequence[str] = GRANTS,
    quota: Mapping[str, Any] | None = None,
    deadline_s: Seconds = RUN_S,
    timeout: Seconds = CREATE_S,
) -> Run:
    """Starts a run of ``loop``, ``group_size`` times for each of ``prompts`` (JSON), or
    finds it where it was started already; a worker's program that had ended goes on.

    ``loop``: ``path.py:function`` or a function; its module is brought into the worker and
    must be whole by itself, besides what the worker's image has. ``container_image`` (or
    ``args``, for limits and layers) is the worker's: Python with this package.
    ``routes``: names of addresses, besides the system itself, that the worker may
    reach; the loop asks :meth:`Rollout.address`. ``grants`` and ``quota`` (arguments of
    ``client.quotas.create``) bound what the worker may do, in a project of the run's own;
    nothing that the submitter may not do itself. The worker and its key end after
    ``deadline_s`` seconds. Needs grants to make projects and keys, and for each route.
    """
    source, name = _source(loop)
    ports = {BUS: BUS_PORT} | {route: FIRST_PORT + i for i, route in enumerate(routes)}
    plan = Plan(run_id, name, list(prompts), group_size, at_once, ports)
    project = _project_of(client, run_id)
    await _make_project(client, project, quota)
    inner = await _in_project(client, project).open()
    try:
        given = args or DSecContainerRunArgs(container_image=container_image)
        labels = {**given.labels, **ROLE, GROUP: str(group_size)}
        worker = await inner.create(
            replace(given, job=run_id, labels=labels, routes=ports,
                    deadline_s=deadline_s),
            timeout=timeout, request_id=_ids.named(project, run_id, "worker"),
        )  # fmt: skip
        if not await worker.files.exists(PLAN, user="root"):
            every = [*grants, *(f"route.{route}" for route in ports)]
            secret = await _key(inner, every, deadline_s)
            await _hand_over(worker, plan, source, _credentials(secret, project))
        await _start(worker)
    except BaseException:
        await inner.close()
        raise
    return Run(inner, run_id, worker, parent=client.project)


async def attach(client: DSecClient, run_id: str) -> Run:
    """The run that was submitted with this id in the client's project. Raises
    ``NotFound``."""
    inner = await _in_project(client, _project_of(client, run_id)).open()
    try:
        async for found in inner.list(job=run_id, labels=ROLE, state=LIVE):
            return Run(inner, run_id, found, parent=client.project)
        raise NotFound(f"there is no run {run_id!r}", field="run_id")
    except BaseException:
        await inner.close()
        raise


async def _make_project(client: DSecClient, project: str, quota: Mapping[str, Any] | None) -> None:
    with contextlib.suppress(Conflict):  # it was made before
        await client.projects.create(project, id=project)
    if quota:
        await client.quotas.create(project=project, **quota)


async def _key(inner: DSecClient, grants: Sequence[str], expires_in_s: Seconds) -> str:
    """The worker's key; one that was made before, and whose secret nobody has, goes."""
    await _revoke(inner)
    made = await inner.keys.create("worker", grants=grants, kind="agent", expires_in_s=expires_in_s)
    assert made.secret is not None
    return made.secret


async def _revoke(inner: DSecClient) -> None:
    for key in await inner.keys.list():
        if not key.revoked:
            await inner.keys.delete(key.id)


def _credentials(secret: str, project: str) -> str:
    values = {"url": f"nats://127.0.0.1:{BUS_PORT}", "api_key": secret, "project": project}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


async def _hand_over(worker: Sandbox, plan: Plan, source: str, credentials: str) -> None:
    """The plan last: where it is, everything is."""
    files = worker.files
    await files.mkdir(HOME, user="root", parents=True)
    await files.write(LOOP, source, user="root")
    await files.write(CREDENTIALS, credentials, user="root", mode=0o600)
    await files.write(PLAN, msgspec.json.encode(plan), user="root")


async def _start(worker: Sandbox) -> None:
    """Starts the worker's program; where it runs already, another one ends at once."""
    line = f"nohup python3 -m libdsec.rollout.worker >>{LOG} 2>&1 </dev/null &"
    await worker.exec(
        line, user="root", cwd=HOME, env={"DSEC_CONFIG": CREDENTIALS}, timeout=STEP_S,
        check=True,
    )  # fmt: skip


def _source(loop: LoopSource) -> tuple[str, str]:
    """The text of a loop's module, and its name there."""
    if isinstance(loop, str):
        path, _, name = loop.rpartition(":")
        if not path or not name.isidentifier():
            raise InvalidRequest("loop: expected path.py:function, or a function", field="loop")
        return Path(path).read_text(), name
    name = getattr(loop, "__qualname__", "")
    module = inspect.getmodule(loop)
    if module is None or not name.isidentifier():
        raise InvalidRequest("a loop is a function at the top of a module", field="loop")
    return inspect.getsource(module), name
