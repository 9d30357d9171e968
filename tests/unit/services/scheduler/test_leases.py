"""Who holds a job, and what its stop and its silence mean."""

from __future__ import annotations

import pytest

from schemas.job import JobRequest
from services.scheduler import leases
from services.scheduler.leases import Job
from shared.errors import Conflict, NotFound

FIRST, SECOND = "01hfirst000000000000000000", "01hsecond00000000000000000"


def request(holder: str = FIRST, **kw) -> JobRequest:
    return JobRequest(**{"request_id": FIRST, "job": "run", "holder": holder, **kw})


def held(at: float = 100.0, **kw) -> Job:
    return leases.opened(Job(project="lab", id="run"), request(**kw), principal="p", at=at)


def test_opening_starts_a_lease() -> None:
    job = held(lease_s=30, on_lost="stop")
    assert (job.state, job.lease_until, job.on_lost, job.epoch) == ("leased", 130.0, "stop", 1)


def test_opening_again_takes_the_job_over_and_is_counted() -> None:
    job = leases.opened(held(), request(SECOND), principal="q", at=110.0)
    assert (job.holder, job.epoch, job.principal) == (SECOND, 2, "q")
    with pytest.raises(Conflict) as caught:
        leases.renewed(job, request(FIRST), at=111.0)
    assert caught.value.field == "holder"
    assert leases.renewed(job, request(SECOND), at=111.0).lease_until == 171.0


def test_a_repeated_opening_of_the_same_holder_is_the_same_epoch() -> None:
    assert leases.opened(held(), request(), principal="p", at=101.0).epoch == 1


def test_a_lease_that_ran_out_lives_again_when_its_holder_renews() -> None:
    job = leases.lapsed(held(), at=200.0)
    assert job.state == "lapsed"
    again = leases.renewed(job, request(), at=210.0)
    assert (again.state, again.lapsed_at, again.epoch) == ("leased", None, 1)


def test_what_nobody_opened_cannot_be_renewed() -> None:
    with pytest.raises(NotFound) as caught:
        leases.renewed(Job(project="lab", id="run"), request(), at=1.0)
    assert caught.value.field == "job"


def test_a_stop_ends_what_was_asked_for_before_it_and_nothing_later() -> None:
    job = leases.stopped(held(), asked_at=150.0, at=151.0)
    assert job.state == "leased"
    assert leases.starts_nothing(job, asked_at=149.9)
    assert leases.starts_nothing(job, asked_at=150.0)
    assert not leases.starts_nothing(job, asked_at=150.1)
    assert not leases.starts_nothing(held(), asked_at=1.0)
    assert not leases.starts_nothing(None, asked_at=1.0)


def test_a_late_copy_of_an_old_stop_takes_nothing_back() -> None:
    job = leases.stopped(held(), asked_at=150.0, at=151.0)
    assert leases.stopped(job, asked_at=120.0, at=152.0).stopped_at == 150.0
