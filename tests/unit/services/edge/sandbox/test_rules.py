"""Decisions about one sandbox."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.sandbox import ImageConfig, ResolvedSpec, SandboxSpec, StartItem
from services.edge.drivers.base import BackendReport, Feature, Layer
from services.edge.sandbox import rules
from services.edge.sandbox.rules import Age
from shared import lifecycle
from shared.errors import BY_CODE, CapacityExhausted, Internal, NotFound, PolicyDenied

generations = st.integers(0, 6)
perhaps = st.none() | generations


@given(generations, perhaps, perhaps)
def test_a_uid_never_gets_a_second_sandbox(
    generation: int, present: int | None, buried: int | None
) -> None:
    verdict = rules.judge_start(generation, present=present, buried=buried)
    if verdict == "start":
        assert present is None and (buried is None or buried < generation)
    if present is not None:
        assert verdict == ("adopt" if generation > present else "repeat")


@given(generations, generations)
def test_a_stop_of_the_present_command_is_always_obeyed(generation: int, present: int) -> None:
    verdict = rules.judge_op("stop", generation, present=present)
    assert verdict == ("do" if generation >= present else "repeat")


def test_a_repeated_pause_is_not_done_again() -> None:
    """Else one that is delivered twice would undo the resume in between."""
    assert rules.judge_op("pause", 2, present=2) == "repeat"
    assert rules.judge_op("pause", 3, present=2) == "do"
    assert rules.judge_op("set_timeout", 2, present=2) == "do"


@given(generations, generations, st.floats(0, 10), st.floats(0, 10))
def test_of_two_renewals_the_one_asked_later_counts(
    generation: int, present: int, asked: float, renewed: float
) -> None:
    """Whatever else the sandbox was told in between. (L17)"""
    verdict = rules.judge_op(
        "set_timeout", generation, present=present, asked_at=asked, renewed_at=renewed
    )
    assert verdict == ("do" if asked >= renewed else "repeat")


seconds = st.none() | st.floats(0.1, 1e6)


@given(seconds, seconds, st.floats(0, 1e6), st.floats(0, 1e6), st.booleans())
def test_time_is_up_exactly_when_it_is(
    idle_s: float | None, deadline_s: float | None, age: float, rest: float, running: bool
) -> None:
    times = rules.Times(idle_s, deadline_s)
    due = rules.due(times, Age(age, rest, running))
    over = deadline_s is not None and age >= deadline_s
    idle = idle_s is not None and running and rest >= idle_s
    assert due.cause == ("deadline" if over else "idle_timeout" if idle else None)
    if due.cause is None and due.wait_s is not None:
        assert due.wait_s > 0
    if deadline_s is None and (idle_s is None or not running):
        assert due == rules.Due()


spans = st.floats(0, 1e4)


@given(spans, spans, spans, spans, st.none() | spans)
def test_a_lease_and_the_time_for_scoring_hold_off_the_end_within_their_bounds(
    over: float, scoring_s: float, held: float, most: float, scoring: float | None
) -> None:
    """``over``: how long ago the deadline was; ``scoring``: since when it stands for its
    verifier alone."""
    times = rules.Times(deadline_s=10.0, scoring_s=scoring_s)
    since = None if scoring is None else ("idle_timeout", scoring)
    age = Age(10.0 + over, held_s=held, scoring=since)
    due = rules.due(times, age, held_max_s=most)
    up_s = age.age_s - 10.0 if scoring is None else scoring
    held_off = min(held, most - up_s) > 0
    if held_off:
        assert due.cause is None and due.wait_s is not None and 0 < due.wait_s <= held
    elif up_s >= scoring_s:
        assert due == rules.Due("deadline" if scoring is None else "idle_timeout")
    elif scoring is None:
        assert due == rules.Due("deadline", then="score")
    else:
        assert due.cause is None and due.wait_s == scoring_s - scoring


def test_a_held_sandbox_is_not_idle() -> None:
    times = rules.Times(idle_s=5.0)
    assert rules.due(times, Age(60.0, idle_s=9.0, held_s=3.0), held_max_s=0.0).wait_s == 3.0
    assert rules.due(times, Age(60.0, idle_s=9.0), held_max_s=0.0).cause == "idle_timeout"


def test_time_for_scoring_needs_a_backend_that_kills_an_agents_processes_alone() -> None:
    spec = SandboxSpec(backend="fake", scoring_grace_s=5.0)
    refused = rules.check_spec(spec, BackendReport(True))
    assert refused is not None and refused.field == "scoring_grace_s"
    report = BackendReport(True, features={"clear": Feature(True)})
    assert rules.check_spec(spec, report) is None
    assert rules.times(spec).scoring_s == 5.0


def test_what_is_offline_reaches_nothing_whatever_its_rules_say() -> None:
    policy = {"preset": "research", "stages": {"work": {"network": {"npm": True}}}}
    spec = SandboxSpec(network_rules={"pypi": True}, policy={**policy, "stage": "work"})
    assert rules.policy_of(spec).reaches_out
    assert not rules.policy_of(msgspec.structs.replace(spec, offline=True)).reaches_out


def test_zero_removes_a_limit_and_none_keeps_it() -> None:
    times = rules.Times(10.0, 20.0)
    assert times.renewed(None, None, age_s=5.0) == times
    assert times.renewed(0.0, None, age_s=5.0) == rules.Times(None, 20.0)
    assert times.renewed(None, 0.0, age_s=5.0) == rules.Times(10.0, None)


def test_a_new_deadline_counts_from_now() -> None:
    assert rules.Times(10.0, 20.0).renewed(3.0, 30.0, age_s=19.0) == rules.Times(3.0, 49.0)


@pytest.mark.parametrize("code", sorted(BY_CODE))
def test_every_failed_start_has_a_cause_the_scheduler_knows(code: str) -> None:
    observed, cause = rules.failed_start(BY_CODE[code]("x"))
    assert cause in lifecycle.CAUSES
    assert (observed == "refused") == (code in ("capacity_exhausted", "unavailable"))


def test_a_cause_of_the_error_wins() -> None:
    assert rules.failed_start(NotFound("x", cause="image")) == ("failed", "image")
    assert rules.failed_start(Internal("x", cause="start_timeout")) == (
        "failed",
        "start_timeout",
    )
    assert rules.failed_start(Internal("x", cause="made up")) == ("failed", "runtime")
    assert rules.failed_start(CapacityExhausted("x")) == ("refused", "capacity")


REPORT = BackendReport(True, features={"a": Feature(True), "b": Feature(False, "no bpf")})


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(), None),
        (SandboxSpec(require=["a"]), None),
        (SandboxSpec(require=["a", "b"]), "require"),
        (SandboxSpec(require=["unheard"]), "require"),
        (SandboxSpec(policy={"network": {}}), None),
        (SandboxSpec(policy={"files": {"hidden": ["/x"]}}), "policy.files.hidden"),
        (SandboxSpec(policy={"filez": {}}), "policy.filez"),
        (SandboxSpec(on_timeout="pause"), "on_timeout"),
        (SandboxSpec(disk_limit_mb=64), "disk_limit_mb"),
    ],
)
def test_what_cannot_be_honoured_is_named(spec: SandboxSpec, field: str | None) -> None:
    error = rules.check_spec(spec, REPORT)
    assert (error.field if error else None) == field


def test_the_reason_of_a_missing_enforcer_is_told() -> None:
    error = rules.check_spec(SandboxSpec(require=["b"]), REPORT)
    assert isinstance(error, PolicyDenied) and "no bpf" in error.message
    broken = rules.check_spec(SandboxSpec(), BackendReport(False, "no engine"))
    assert broken is not None and "no engine" in broken.message


def test_the_smaller_of_two_limits_of_disk_is_in_force_and_committed() -> None:
    item = StartItem(uid="0" * 26, project="p", generation=1, spec=0, expires_at=0.0)
    for asked, policy, disk_mb in ((64, 32, 32), (None, 32, 32), (64, None, 64), (16, 32, 16)):
        limits = {"inodes": 500} if policy is None else {"disk_mb": policy, "inodes": 500}
        spec = SandboxSpec(disk_limit_mb=asked, policy={"resources": limits})
        start = rules.start_spec(item, ResolvedSpec(spec=spec, image=ImageConfig()), [])
        assert (start.disk_mb, start.inodes) == (disk_mb, 500)
        assert rules.demand(spec).disk_mb == disk_mb
    assert rules.demand(SandboxSpec()).disk_mb == 0


def test_a_spec_goes_over_the_defaults_of_its_image() -> None:
    item = StartItem(uid="0" * 26, project="p", generation=1, spec=0, expires_at=0.0)
    image = ImageConfig(env={"A": "i", "B": "i"}, workdir="/w", user="agent")
    layers = [Layer("d", "/m")]
    plain = rules.start_spec(item, ResolvedSpec(spec=SandboxSpec(), image=image), layers)
    assert (plain.env, plain.workdir, plain.user) == ({"A": "i", "B": "i"}, "/w", "agent")
    spec = SandboxSpec(env={"B": "s"}, workdir="/x", init_user="root", memory_limit_mb=64)
    over = rules.start_spec(item, ResolvedSpec(spec=spec, image=image), layers)
    assert (over.env, over.workdir, over.user) == ({"A": "i", "B": "s"}, "/x", "root")
    assert (over.memory_mb, over.layers) == (64, layers)
    bare = rules.start_spec(item, ResolvedSpec(spec=SandboxSpec()), [])
    assert (bare.workdir, bare.user) == ("/", "root")
