"""Rewards from reports."""

from __future__ import annotations

from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.grading import MAX_REPORT_BYTES, BadReport, Outcome, grade, parse_report, split_tests

pytestmark = pytest.mark.unit

BODY: dict[Outcome, str] = {
    "passed": "",
    "failed": "<failure message='no'>trace</failure>",
    "skipped": "<skipped/>",
}


def report(*cases: tuple[str, Outcome]) -> bytes:
    rows = "".join(
        f"<testcase classname='t' name={quoteattr(name)}>{BODY[outcome]}</testcase>"
        for name, outcome in cases
    )
    return f"<testsuites><testsuite>{rows}</testsuite></testsuites>".encode()


def test_all_wanted_tests_passing_is_one() -> None:
    xml = report(("a", "passed"), ("b", "passed"), ("unrelated", "failed"))
    assert grade(xml, fail_to_pass=["t::a"], pass_to_pass=["t::b"]).reward == 1.0


@pytest.mark.parametrize("outcome", ["failed", "skipped"])
def test_a_wanted_test_that_does_not_pass_is_zero_and_named(outcome: Outcome) -> None:
    got = grade(
        report(("a", "passed"), ("b", outcome)), fail_to_pass=["t::a"], pass_to_pass=["t::b"]
    )
    assert (got.reward, got.missed_fail_to_pass, got.missed_pass_to_pass) == (0.0, [], ["t::b"])


def test_a_wanted_test_that_did_not_run_is_zero() -> None:
    got = grade(report(("b", "passed")), fail_to_pass=["t::a"], pass_to_pass=["t::b"])
    assert (got.reward, got.missed_fail_to_pass) == (0.0, ["t::a"])


@pytest.mark.parametrize(
    "xml",
    [
        b"",
        b"not xml",
        b"<testsuites>",
        b"<html/>",
        b"<!DOCTYPE x [<!ENTITY a 'b'>]><testsuites/>",
        b" " * (MAX_REPORT_BYTES + 1),
    ],
    ids=["empty", "text", "cut", "other", "entities", "large"],
)
def test_a_bad_report_is_zero_with_a_reason(xml: bytes) -> None:
    with pytest.raises(BadReport):
        parse_report(xml)
    got = grade(xml, fail_to_pass=["t::a"], pass_to_pass=[])
    assert got.reward == 0.0
    assert got.reason


def test_the_worst_outcome_of_a_repeated_id_counts() -> None:
    assert parse_report(report(("a", "failed"), ("a", "passed"))) == {"t::a": "failed"}
    assert parse_report(report(("a", "passed"), ("a", "failed"))) == {"t::a": "failed"}


def test_an_error_at_teardown_is_a_failure() -> None:
    xml = b"<testsuite><testcase classname='t' name='a'><error/></testcase></testsuite>"
    assert parse_report(xml) == {"t::a": "failed"}


OUTCOMES = st.dictionaries(st.text("abc", min_size=1), st.sampled_from(sorted(BODY)))


@given(before=OUTCOMES, after=OUTCOMES)
def test_the_split_is_what_grading_rewards(
    before: dict[str, Outcome], after: dict[str, Outcome]
) -> None:
    """The run after the fix always scores 1; the run before scores 0 as soon as there
    is a fail-to-pass test."""
    f2p, p2p = split_tests(
        {f"t::{k}": v for k, v in before.items()}, {f"t::{k}": v for k, v in after.items()}
    )
    assert not set(f2p) & set(p2p)
    assert grade(report(*after.items()), fail_to_pass=f2p, pass_to_pass=p2p).reward == 1.0
    if f2p:
        assert grade(report(*before.items()), fail_to_pass=f2p, pass_to_pass=p2p).reward == 0.0
