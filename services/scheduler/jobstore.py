"""All SQL on jobs.

Owns: statements on ``job``, and which sandboxes a lost job has. Job rows are locked
before the sandboxes they are for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.job import JobQuery
from services.scheduler.leases import Job
from services.scheduler.model import Sandbox
from services.scheduler.store import LIVE, SELECT, fetch, sandbox_of
from shared import db

JobKey = tuple[str, str]
"""Project and job."""

_SELECT = """
    select project, id, state, epoch, holder, principal, lease_s, on_lost,
        extract(epoch from lease_until)::float8 as lease_until,
        extract(epoch from lapsed_at)::float8 as lapsed_at,
        extract(epoch from stopped_at)::float8 as stopped_at,
        extract(epoch from changed_at)::float8 as changed_at
    from job
"""
_NAMED = (
    "where (project, id) in (select p, i from "
    "unnest(cast(:p as text[]), cast(:i as text[])) as n(p, i)) order by project, id "
)
_ENSURE = text(
    "insert into job (project, id, state, epoch, holder, principal, lease_s, on_lost) "
    "select p, i, 'free', 0, '', '', 0, 'pause' from "
    "unnest(cast(:p as text[]), cast(:i as text[])) as n(p, i) order by p, i "
    "on conflict do nothing"
)
_SHARE = text(_SELECT + _NAMED + "for share")
_LOCK = text(_SELECT + _NAMED + "for update")
_LAPSING = text(
    _SELECT + "where state = 'leased' and lease_until < to_timestamp(:before) "
    "order by project, id limit :n for update skip locked"
)
_SAVE = text(
    "update job set state = :state, epoch = :epoch, holder = :holder, principal = :principal, "
    "lease_s = :lease_s, lease_until = to_timestamp(cast(:lease_until as float8)), "
    "on_lost = :on_lost, lapsed_at = to_timestamp(cast(:lapsed_at as float8)), "
    "stopped_at = to_timestamp(cast(:stopped_at as float8)), "
    "changed_at = to_timestamp(cast(:changed_at as float8)) "
    "where project = :project and id = :id"
)


def _job_of(row: Any) -> Job:
    return Job(**dict(row))


def _by_key(rows: Sequence[Any]) -> dict[JobKey, Job]:
    jobs = [_job_of(r) for r in rows]
    return {(j.project, j.id): j for j in jobs}


def _keys(keys: Collection[JobKey]) -> dict[str, list[str]]:
    ordered = sorted(keys)
    return {"p": [p for p, _ in ordered], "i": [i for _, i in ordered]}


async def share(connection: AsyncConnection, keys: Collection[JobKey]) -> dict[JobKey, Job]:
    """The jobs of creates, made where they are not there; no stop of a whole job comes
    in between until the transaction ends."""
    if not keys:
        return {}
    await db.fetch(connection, _ENSURE, _keys(keys))
    return _by_key(await fetch(connection, _SHARE, **_keys(keys)))


async def lock(connection: AsyncConnection, keys: Collection[JobKey]) -> dict[JobKey, Job]:
    """The jobs of commands, made where they are not there, locked."""
    if not keys:
        return {}
    await db.fetch(connection, _ENSURE, _keys(keys))
    return _by_key(await fetch(connection, _LOCK, **_keys(keys)))


async def lock_lapsing(connection: AsyncConnection, before: float, limit: int) -> list[Job]:
    """A portion of the jobs whose lease ran out before ``before``, locked."""
    return [_job_of(r) for r in await fetch(connection, _LAPSING, before=before, n=limit)]


async def save(connection: AsyncConnection, jobs: Collection[Job]) -> None:
    """Writes locked jobs back."""
    for job in jobs:
        values = {name: getattr(job, name) for name in Job.__struct_fields__}
        await db.fetch(connection, _SAVE, values)


_OF_LAPSED = SELECT + (
    "join job j on j.project = s.project and j.id = s.job "
    "where j.state = 'lapsed' and j.on_lost = '{on_lost}' and {which} "
    "order by s.uid limit :n for update of s skip locked"
)
# one that somebody resumed after the lapse is left to him
_TO_PAUSE = text(
    _OF_LAPSED.format(
        on_lost="pause",
        which="s.state = 'running' "
        "and (s.changed_at <= j.lapsed_at or s.changed_at = s.running_at)",
    )
)
_TO_STOP = text(_OF_LAPSED.format(on_lost="stop", which=f"{LIVE} and s.state <> 'stopping'"))


async def lock_to_pause(connection: AsyncConnection, limit: int) -> list[Sandbox]:
    """A portion of the running sandboxes of lapsed jobs that are to be paused, locked."""
    return [sandbox_of(r) for r in await fetch(connection, _TO_PAUSE, n=limit)]


_PAUSED_BY_LOSS = text(
    SELECT + "where s.project = :project and s.job = :job and s.state in ('pausing', 'paused') "
    "and exists (select from (select t.event, t.by, t.at from transition t "
    "where t.uid = s.uid and t.source = 'running' order by t.id desc limit 1) as l "
    "where l.event = 'pause' and l.by = :by and l.at >= to_timestamp(:lapsed)) "
    "order by s.uid for update of s"
)


async def lock_paused_by_loss(connection: AsyncConnection, job: Job, *, by: str) -> list[Sandbox]:
    """The sandboxes that were paused, by ``by``, because this job was lost, locked."""
    rows = await fetch(
        connection, _PAUSED_BY_LOSS, project=job.project, job=job.id, by=by, lapsed=job.lapsed_at
    )
    return [sandbox_of(r) for r in rows]


async def lock_to_stop(connection: AsyncConnection, limit: int) -> list[Sandbox]:
    """A portion of the sandboxes of lapsed jobs that are to be stopped, locked."""
    return [sandbox_of(r) for r in await fetch(connection, _TO_STOP, n=limit)]


_PAGE = text(
    _SELECT + "where project = :project and (cast(:job as text) is null or id = :job) "
    "and (cast(:after as text) is null or id > :after) order by id limit :n"
)
_COUNTS = text(
    f"select s.job, s.state, count(*) from sandbox s where s.project = :project and {LIVE} "
    "and s.job = any(cast(:jobs as text[])) group by s.job, s.state"
)


async def page(connection: AsyncConnection, query: JobQuery, limit: int) -> list[Job]:
    """Jobs of a project, in the order of their names."""
    rows = await fetch(
        connection, _PAGE, project=query.project, job=query.job, after=query.after, n=limit
    )
    return [_job_of(r) for r in rows]


async def counts(
    connection: AsyncConnection, project: str, jobs: Sequence[str]
) -> dict[str, dict[str, int]]:
    """Live sandboxes of each job by state."""
    out: dict[str, dict[str, int]] = {job: {} for job in jobs}
    for job, state, count in await fetch(connection, _COUNTS, project=project, jobs=list(jobs)):
        out[job][state] = count
    return out

