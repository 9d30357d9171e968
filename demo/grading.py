"""From a test report to a reward. Pure.

The report comes from inside a sandbox, so it is data: bounded in size, and anything
that does not parse grades as no test passed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal
from xml.etree import ElementTree

Outcome = Literal["passed", "failed", "skipped"]

MAX_REPORT_BYTES = 16 * 1024 * 1024
_ELEMENT_OUTCOMES: Mapping[str, Outcome] = {
    "failure": "failed",
    "error": "failed",
    "skipped": "skipped",
}
_SEVERITY: Mapping[Outcome, int] = {"passed": 0, "skipped": 1, "failed": 2}


class BadReport(ValueError):
    """Not a JUnit report: too large, no XML, or another document."""


@dataclass(frozen=True, slots=True)
class Grade:
    """``reward`` is 1.0 when every wanted test passed, else 0.0. ``missed_*`` are the
    wanted tests that failed, were skipped or did not run."""

    reward: float
    missed_fail_to_pass: list[str] = field(default_factory=list)
    missed_pass_to_pass: list[str] = field(default_factory=list)
    reason: str = ""


def parse_report(xml: bytes) -> dict[str, Outcome]:
    """Test id (``class::name``) -> outcome of a pytest JUnit report. An id reported
    more than once (a failing teardown, equal parameters) has its worst outcome.
    Raises :class:`BadReport`."""
    if len(xml) > MAX_REPORT_BYTES:
        raise BadReport(f"report of {len(xml)} bytes: more than {MAX_REPORT_BYTES}")
    if b"<!DOCTYPE" in xml:  # pytest writes none; entities are of no use but to attack
        raise BadReport("report declares a document type")
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise BadReport(f"report is no XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise BadReport(f"report is a <{root.tag}>, not a JUnit document")
    outcomes: dict[str, Outcome] = {}
    for case in root.iter("testcase"):
        test = f"{case.get('classname', '')}::{case.get('name', '')}"
        outcomes[test] = _worst(outcomes.get(test, "passed"), _outcome(case))
    return outcomes


def _outcome(case: ElementTree.Element) -> Outcome:
    found: Outcome = "passed"
    for child in case:
        found = _worst(found, _ELEMENT_OUTCOMES.get(child.tag, "passed"))
    return found


def _worst(one: Outcome, other: Outcome) -> Outcome:
    return max(one, other, key=_SEVERITY.__getitem__)


def grade(
    report: bytes, *, fail_to_pass: Collection[str], pass_to_pass: Collection[str]
) -> Grade:
    """Grade one rollout by the report its tests wrote."""
    try:
        outcomes = parse_report(report)
    except BadReport as error:
        return Grade(0.0, sorted(fail_to_pass), sorted(pass_to_pass), str(error))
    missed_f2p = sorted(test for test in fail_to_pass if outcomes.get(test) != "passed")
    missed_p2p = sorted(test for test in pass_to_pass if outcomes.get(test) != "passed")
    return Grade(0.0 if missed_f2p or missed_p2p else 1.0, missed_f2p, missed_p2p)


def split_tests(
    before: Mapping[str, Outcome], after: Mapping[str, Outcome]
) -> tuple[list[str], list[str]]:
    """(fail-to-pass, pass-to-pass) from runs of the same tests before and after the
    fix. A test that was skipped before is in neither."""
    passing = sorted(test for test, outcome in after.items() if outcome == "passed")
    fail_to_pass = [test for test in passing if before.get(test, "failed") == "failed"]
    pass_to_pass = [test for test in passing if before.get(test) == "passed"]
    return fail_to_pass, pass_to_pass
