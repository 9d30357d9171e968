"""What opening, renewing, stopping and time do to a job's lease. Pure.

Owns: who holds a job, when its lease has run out. Does not own: what then happens to
its sandboxes (``decide``), rows in the database, the clock (times are given).

A job has one holder. Opening takes it from whoever had it, because a trainer that was
restarted must not wait for the lease of its dead self; the former holder learns it
from its next renewal.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from schemas.job import JobInfo, JobRequest
from shared.errors import Conflict, NotFound

FREE, LEASED, LAPSED = "free", "leased", "lapsed"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``job``. Times in seconds since the epoch."""

    project: str
    id: str
    state: str = FREE
    epoch: int = 0
    holder: str = ""
    principal: str = ""
    lease_s: float = 0.0
    lease_until: float | None = None
    on_lost: str = "pause"
    lapsed_at: float | None = None
    stopped_at: float | None = None
    changed_at: float = 0.0


def opened(job: Job, request: JobRequest, *, principal: str, at: float) -> Job:
    """The job in the hands of ``request.holder``. The same holder opening again (its
    answer was lost) is no new epoch."""
    same = job.holder == request.holder and job.state == LEASED
    return replace(
        job, state=LEASED, epoch=job.epoch if same else job.epoch + 1, holder=request.holder,
        principal=principal, lease_s=request.lease_s, lease_until=at + request.lease_s,
        on_lost=request.on_lost, lapsed_at=None, changed_at=at,
    )  # fmt: skip


def renewed(job: Job, request: JobRequest, *, at: float) -> Job:
    """The job with its lease extended; one that ran out lives again. Raises ``Conflict``
    (field ``holder``) where somebody else holds it, ``NotFound`` where nobody does."""
    if not job.holder:
        raise NotFound(f"no job {request.job} was opened", field="job")
    if job.holder != request.holder:
        raise Conflict(
            f"job {job.id} was opened by another process (epoch {job.epoch})", field="holder"
        )
    return replace(
        job, state=LEASED, lease_s=request.lease_s, lease_until=at + request.lease_s,
        on_lost=request.on_lost, lapsed_at=None, changed_at=at,
    )  # fmt: skip


def lost_still(job: Job, *, before: Job) -> Job:
    """The job, held again, while some of its sandboxes are on their way to the pause that
    ``before``, its loss, asked for: the next renewal finds them there."""
    return replace(job, state=before.state, lapsed_at=before.lapsed_at)


def stopped(job: Job, *, asked_at: float, at: float) -> Job:
    """The job after a stop of all its sandboxes: what was asked for before the stop
    starts nothing any more. Its lease goes on."""
    return replace(job, stopped_at=max(asked_at, job.stopped_at or 0.0), changed_at=at)


def starts_nothing(job: Job | None, *, asked_at: float) -> bool:
    """Whether a create asked for at ``asked_at`` came before the job's last stop."""
    return job is not None and job.stopped_at is not None and asked_at <= job.stopped_at


def lapsed(job: Job, *, at: float) -> Job:
    """The job after its lease ran out."""
    return replace(job, state=LAPSED, lapsed_at=at, changed_at=at)


def info_of(job: Job, sandboxes: dict[str, int]) -> JobInfo:
    """A row as clients see it."""
    return JobInfo(
        project=job.project, job=job.id, state=job.state,  # type: ignore[arg-type]
        epoch=job.epoch, holder=job.holder, principal=job.principal, lease_s=job.lease_s,
        lease_until=job.lease_until, on_lost=job.on_lost,  # type: ignore[arg-type]
        changed_at=job.changed_at, sandboxes=sandboxes,
    )  # fmt: skip
