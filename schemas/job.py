"""Messages of jobs: what a trainer's sandboxes belong to while trainers come and go.

A job is a name in a project. Whoever opens it holds its lease until somebody else
does; a lease that is not renewed runs out, and then ``on_lost`` happens to the job's
sandboxes. Times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Message, Token, Uid, UnixTime, Versioned

JobName = Annotated[str, Meta(min_length=1, max_length=128)]
JobState = Literal["free", "leased", "lapsed"]
"""``free``: nobody ever opened it, its sandboxes only carry its name."""
OnLost = Literal["pause", "stop", "keep"]
JobVerb = Literal["open", "renew"]


class JobRequest(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.job.<open|renew>[.<principal>]``.

    ``holder`` names the process that holds the lease: opening takes the job over from
    any other holder, whose next renewal is a conflict.
    """

    request_id: Uid
    job: JobName
    holder: Uid
    lease_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    on_lost: OnLost = "pause"


class JobCommand(Versioned, frozen=True):
    """auth → scheduler, ``dsec.cmd.v1.job.<open|renew>.<project>``: a
    :class:`JobRequest`, admitted."""

    project: Token
    principal: str
    verb: JobVerb
    request: JobRequest
    reply_to: str | None = None


class JobInfo(Message, frozen=True):
    """A job. ``epoch`` counts its holders; ``sandboxes`` the live ones by state."""

    project: Token
    job: str
    state: JobState
    epoch: int = 0
    holder: str = ""
    principal: str = ""
    lease_s: float = 0.0
    lease_until: UnixTime | None = None
    on_lost: OnLost = "pause"
    changed_at: UnixTime = 0.0
    sandboxes: dict[str, int] = {}


class JobReply(Versioned, frozen=True):
    """→ the client's inbox."""

    request_id: Uid
    job: JobInfo


class JobQuery(Versioned, frozen=True):
    """client → auth, ``dsec.get.v1.<project>.job.list``. ``after`` is the last name of
    the page before."""

    job: JobName | None = None
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    project: str | None = None


class JobPage(Versioned, frozen=True):
    """Jobs in the order of their names; ``next`` is set where more follow."""

    jobs: list[JobInfo]
    next: str | None = None
