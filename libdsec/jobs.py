"""Jobs: sandboxes that belong to a training run, not to a process.

Owns: holding a job's lease, adopting what is alive, calls on all its sandboxes at once.
Does not own: when a lease is lost and what then happens; the scheduler does.

A trainer that dies stops renewing. Its job is then paused (or whatever ``on_lost``
says), and whoever opens the same job next has the same sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from libdsec import _ids
from libdsec._core import Core
from libdsec._create import CREATE_S
from libdsec._wire import JobInfo, JobPage, JobQuery, JobReply, JobRequest
from libdsec.args import DSecRunArgs, Seconds, seconds
from libdsec.errors import Conflict, DSecError, InvalidRequest, NotFound
from libdsec.sandbox import Sandbox

if TYPE_CHECKING:
    from libdsec.client import DSecClient

log = logging.getLogger("libdsec")

LEASE_S = 60.0
RENEWALS = 3
"""Renewals within one lease."""
LIVE = ("requested", "placed", "starting", "running", "pausing", "paused", "resuming")
ON_LOST = ("pause", "stop", "keep")


class Job:
    """A job of the client's project, held between ``async with``'s beginning and end.

    ``id`` is any name of up to 128 characters. ``sandboxes`` are those that were alive
    when the job was opened, then also those created through it. Leaving the block
    stops the renewals and nothing else: a trainer that comes back within ``lease_s``
    seconds finds everything running, one that comes later finds it as ``on_lost``
    left it. :meth:`stop` ends the sandboxes.
    """

    def __init__(
        self, client: DSecClient, id: str, *, lease_s: Seconds = LEASE_S, on_lost: str = "pause"
    ) -> None:
        lease = seconds(lease_s, "lease_s")
        if not isinstance(id, str) or not 1 <= len(id) <= 128:
            raise InvalidRequest("a job's id has 1 to 128 characters", field="id")
        if lease is None or not 1 <= lease <= 86_400:
            raise InvalidRequest("lease_s: 1 to 86400 s", field="lease_s")
        if on_lost not in ON_LOST:
            raise InvalidRequest(f"on_lost: one of {', '.join(ON_LOST)}", field="on_lost")
        self._client = client
        self.id = id
        self.lease_s = lease
        self.on_lost = on_lost
        self.sandboxes: list[Sandbox] = []
        self.epoch = 0
        """How often the job has been taken over, this time included."""
        self.lost: DSecError | None = None
        """Why the job is no longer ours: another process opened it."""
        self._holder = _ids.new()
        self._task: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        held = "held" if self._task is not None and self.lost is None else "not held"
        return f"Job({self.id!r}, {held}, epoch={self.epoch}, sandboxes={len(self.sandboxes)})"

    async def open(self) -> Job:
        """Takes the job, from whoever held it, adopts what is alive and begins to renew."""
        if self._task is None:
            info = await self._ask("open")
            self.epoch = info.epoch
            self.lost = None
            self.sandboxes = [s async for s in self._client.list(job=self.id, state=LIVE)]
            self._task = asyncio.create_task(self._renew(), name=f"job {self.id}")
        return self

    async def close(self) -> None:
        """Stops renewing; the lease runs out by itself. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def __aenter__(self) -> Job:
        return await self.open()

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()

    async def _ask(self, verb: str) -> JobInfo:
        calls, project = self._client._core.calls, self._client.project
        request = JobRequest(
            request_id=_ids.new(), job=self.id, holder=self._holder, lease_s=self.lease_s,
            on_lost=self.on_lost,  # type: ignore[arg-type]
        )  # fmt: skip
        subject = calls.req_subject(project, "job", verb)
        return (await calls.change(subject, request, JobReply)).job

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self.lease_s / RENEWALS)
            try:
                await self._ask("renew")
            except (Conflict, NotFound) as exc:
                self.lost = exc
                log.warning("job %s is lost: %s", self.id, exc)
                return
            except DSecError as exc:  # it is tried again; the lease outlives a few failures
                log.warning("job %s was not renewed: %s", self.id, exc)

    def _held(self) -> None:
        if self.lost is not None:
            raise self.lost

    async def create(
        self,
        args: DSecRunArgs,
        *,
        key: str | None = None,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
    ) -> Sandbox:
        """One sandbox of the job. With the same ``key`` it is the same sandbox, also when
        another process of the same job asks: a trainer that was restarted repeats its
        calls and gets what it had. Raises ``Conflict`` where another process has taken
        the job over, or ``key`` meant other arguments."""
        made = await self._client.create(
            self._own(args), timeout=timeout, wait=wait, request_id=self._request_id(key)
        )
        self._adopt([made])
        return made

    async def create_many(
        self,
        args: DSecRunArgs | Sequence[DSecRunArgs],
        *,
        n: int | None = None,
        key: str | None = None,
        timeout: Seconds = CREATE_S,
        wait: bool = True,
    ) -> list[Sandbox | DSecError]:
        """As ``client.create_many``, in the job; ``key`` as in :meth:`create`."""
        many: DSecRunArgs | list[DSecRunArgs]
        many = self._own(args) if isinstance(args, DSecRunArgs) else [self._own(a) for a in args]
        made = await self._client.create_many(
            many, n=n, timeout=timeout, wait=wait, request_id=self._request_id(key)
        )
        self._adopt([m for m in made if isinstance(m, Sandbox)])
        return made

    def _own(self, args: DSecRunArgs) -> DSecRunArgs:
        self._held()
        if args.job not in (None, self.id):
            raise InvalidRequest(f"the arguments are of job {args.job!r}", field="job")
        return replace(args, job=self.id)

    def _request_id(self, key: str | None) -> str | None:
        return _ids.named(self._client.project, self.id, key) if key is not None else None

    def _adopt(self, made: Sequence[Sandbox]) -> None:
        known = {s.uid for s in self.sandboxes}
        self.sandboxes += [s for s in made if s.uid not in known]

    async def info(self) -> JobInfo:
        """``.state`` (``free``, ``leased``, ``lapsed``), ``.lease_until``, ``.holder``,
        ``.epoch`` and ``.sandboxes`` (live ones by state). Raises ``NotFound``."""
        return await self._client.jobs.get(self.id)

    async def pause(self) -> dict[str, DSecError | str]:
        """Pauses all sandboxes of the job in one request: uid → state or error."""
        return await self._operate("pause")

    async def resume(self) -> dict[str, DSecError | str]:
        """Resumes all of them in one request: uid → state or error."""
        return await self._operate("resume")

    async def stop(self, *, grace_s: Seconds = 0.0) -> dict[str, DSecError | str]:
        """Stops all of them, also those that are still being created: uid → state or
        error. What is created later lives."""
        return await self._operate("stop", grace_s=grace_s)

    async def _operate(self, verb: str, **facts: Seconds) -> dict[str, DSecError | str]:
        self._held()
        all_of: Callable[..., Awaitable[dict[str, DSecError | str]]]
        all_of = getattr(self._client.jobs, verb)
        found = await all_of(self.id, **facts)
        for sandbox in self.sandboxes:
            outcome = found.get(sandbox.uid)
            if isinstance(outcome, str):
                sandbox.state = outcome
        return found


class Jobs:
    """``client.jobs``: the jobs of the project, whoever holds them."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"Jobs(project={self._core.config.project!r})"

    async def list(self) -> AsyncIterator[JobInfo]:
        """All jobs that are known, in the order of their names."""
        after: str | None = None
        while True:
            page = await self._page(JobQuery(after=after))
            for job in page.jobs:
                yield job
            after = page.next
            if after is None:
                return

    async def get(self, id: str) -> JobInfo:
        """One job. Raises ``NotFound``."""
        page = await self._page(JobQuery(job=id))
        if not page.jobs:
            raise NotFound(f"there is no job {id!r}", field="id")
        return page.jobs[0]

    async def pause(self, id: str) -> dict[str, DSecError | str]:
        """Pauses all sandboxes of a job in one request: uid → state or error."""
        return await self._core.operate_where("pause", job=id, labels={})

    async def resume(self, id: str) -> dict[str, DSecError | str]:
        """Resumes all of them."""
        return await self._core.operate_where("resume", job=id, labels={})

    async def stop(self, id: str, *, grace_s: Seconds = 0.0) -> dict[str, DSecError | str]:
        """Stops all of them, also those that are still being created."""
        grace = seconds(grace_s, "grace_s") or 0.0
        return await self._core.operate_where("stop", job=id, labels={}, grace_s=grace)

    async def _page(self, query: JobQuery) -> JobPage:
        subject = self._core.calls.get_subject(self._core.config.project, "job", "list")
        return await self._core.calls.read(subject, query, JobPage)
