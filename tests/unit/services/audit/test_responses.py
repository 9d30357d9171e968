"""What follows a finding is the operator's choice, and asked for like anything else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import json

from schemas.audit import Finding
from schemas.sandbox import SandboxOpRequest, Tightening
from services.audit.responses import PRINCIPAL, decide, read
from shared.errors import DsecError, InvalidRequest

TABLE = """
[[response]]
rule = "extent_swap_*"
do = "kill"

[[response]]
project = "exam-*"
severity = ["high", "critical"]
confidence = 0.8
do = "freeze"
"""


def finding(**facts: Any) -> Finding:
    values = {
        "id": "f1", "at": 1.0, "project": "p1", "severity": "high", "rule": "fork_bomb",
        "explanation": "x", "uid": "01jd0000000000000000000000", **facts,
    }  # fmt: skip
    return Finding(**values)


@pytest.mark.parametrize(
    ("facts", "verb"),
    [
        ({}, None),
        ({"rule": "extent_swap_ioctl"}, "stop"),
        ({"project": "exam-7"}, "pause"),
        ({"project": "exam-7", "severity": "low"}, None),
        ({"project": "exam-7", "confidence": 0.5}, None),
    ],
)
def test_the_first_choice_that_fits_counts(facts: dict[str, Any], verb: str | None) -> None:
    told, requests = decide(finding(**facts), read(TABLE))
    assert told.refused is None
    if verb is None:
        assert (told.response, requests) == ("alert", [])
        return
    (request,) = requests
    assert request.subject == f"dsec.req.v1.{told.project}.sandbox.{verb}.{PRINCIPAL}"
    body = json.decode(request.data)
    assert (body["uids"], body["cause"]) == ([told.uid], "policy_violation")


def test_the_same_finding_asks_for_the_same_thing() -> None:
    table = read(TABLE)
    once, again = (decide(finding(rule="extent_swap_x"), table)[1] for _ in range(2))
    assert once == again


def test_a_quarantine_stops_it_and_keeps_its_disk_under_a_name_that_is_told() -> None:
    told, (pause, snapshot) = decide(finding(response="quarantine"), [])
    assert pause.subject.split(".")[5:] == ["pause", PRINCIPAL]
    assert snapshot.subject.split(".")[5:] == ["snapshot", PRINCIPAL]
    body = json.decode(snapshot.data)
    assert (body["uid"], told.snapshot) == (told.uid, f"snapshot/{body['request_id']}")
    assert json.decode(pause.data)["request_id"] != body["request_id"]


TIGHT = """
[[response]]
rule = "port_scan"
do = "tighten"
tighten = { network = ["10.0.0.0/8"], deny = ["ptrace"] }

[[response]]
do = "tighten"
"""


def test_what_is_tightened_is_data_and_told_in_the_finding() -> None:
    """The operator's, else the rule's, else no way out is left."""
    ours, both = Tightening(network=["pypi"]), Tightening(network=["10.0.0.0/8"], deny=["ptrace"])
    for facts, by in (
        ({"rule": "port_scan", "tighten": ours}, both),
        ({"tighten": ours}, ours),
        ({}, Tightening(network=["*"])),
    ):
        told, (request,) = decide(finding(**facts), read(TIGHT))
        assert (told.response, told.tighten, told.refused) == ("tighten", by, None)
        assert request.subject.split(".")[4:] == ["sandbox", "tighten", PRINCIPAL]
        assert json.decode(request.data, type=SandboxOpRequest).tighten == by
    told, _ = decide(finding(tighten=ours, response="kill"), [])
    assert told.tighten is None


def test_a_tightening_that_means_nothing_is_refused_at_the_start() -> None:
    for how in ('network = ["not a host"]', 'deny = ["ptrce"]', 'deny = ["exec:/bin/sh"]'):
        with pytest.raises(DsecError):
            read('[[response]]\ndo = "tighten"\ntighten = {' + how + "}")


def test_what_cannot_be_done_is_told_as_refused() -> None:
    told, requests = decide(finding(response="kill", uid=None), [])
    assert requests == []
    assert told.refused is not None


@pytest.mark.parametrize("text", ["[[response]", '[[response]]\ndo = "shoot"', "[[response]]"])
def test_a_wrong_table_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="responses"):
        read(text)
