"""Every kind of entry is an event of a class, and nothing of it is left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libdsec import ocsf
from libdsec._wire import AuditEntry

DENIED = {"actor": {"comm": "curl", "pid": 7}, "verdict": "denied", "uid": "u", "node": "n1"}
CASES: list[tuple[str, dict[str, Any], int, int]] = [
    ("finding", {"id": "f", "severity": "critical", "rule": "r", "explanation": "a|b=c\n",
                 "confidence": 0.5, "evidence": ["n/1"], "uid": "u", "first_at": 1.0},
     ocsf.FINDING, 1),
    ("access", {"verb": "sandbox.create", "outcome": "ok", "principal": "p"}, ocsf.API, 1),
    ("access", {"verb": "sandbox.exec", "outcome": "forbidden"}, ocsf.API, ocsf.OTHER),
    ("violation", {**DENIED, "source": "bpf_net",
                   "destination": {"address": "192.0.2.1", "port": 80}}, ocsf.NETWORK, 5),
    ("violation", {**DENIED, "source": "dns", "destination": {"domain": "a.example"}},
     ocsf.DNS, 1),
    ("violation", {**DENIED, "source": "bpf_lsm", "path": "/bin/sh", "action": "write"},
     ocsf.FILE, 3),
    ("violation", {**DENIED, "source": "seccomp", "syscall": "bpf"}, ocsf.KERNEL, ocsf.OTHER),
    ("violation", {"source": "resource", "verdict": "observed"}, ocsf.PROCESS, ocsf.OTHER),
    ("retention", {"day": "2026-01-01"}, ocsf.PROCESS, ocsf.OTHER),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "record", "class_", "activity"), CASES)
def test_entries_become_events(
    kind: str, record: dict[str, Any], class_: int, activity: int
) -> None:
    record = {"at": 1_800_000_000.25, "project": "p1", **record}
    made = ocsf.event(AuditEntry(seq=9, kind=kind, record=record, hash="00", id="i"))
    made = json.loads(json.dumps(made))
    assert (made["class_uid"], made["activity_id"]) == (class_, activity)
    assert made["type_uid"] == class_ * 100 + activity
    assert made["category_uid"] == class_ // 1000
    assert made["time"] == 1_800_000_000_250
    assert made["severity_id"] in range(1, 6)
    assert made["metadata"]["uid"] == "i"
    assert record.items() <= made["unmapped"].items()


def test_a_finding_has_its_confidence_its_evidence_and_its_text() -> None:
    _, record, _, _ = CASES[0]
    made = ocsf.event(AuditEntry(seq=9, kind="finding", record=record, hash="00", id="i"))
    assert (made["severity_id"], made["confidence_score"]) == (5, 50)
    assert made["finding_info"]["desc"] == "a|b=c\n"
    assert made["finding_info"]["related_events"] == [{"uid": "n/1"}]
