"""What a request changes of a spec."""

from __future__ import annotations

import pytest

from schemas.exec import PolicyRequest
from schemas.sandbox import SandboxSpec
from services.edge import rules
from services.edge.repolicing import changed, check
from shared.errors import InvalidRequest

SPEC = SandboxSpec(
    network_rules={"pypi": True}, policy={"stages": {"a": {}}, "stage": "a"}, deadline_s=100.0
)


def asked(**what: object) -> SandboxSpec:
    return changed(SPEC, PolicyRequest(op_id="x" * 26, **what))  # type: ignore[arg-type]


def test_what_is_not_named_stays() -> None:
    assert asked() == SPEC
    assert asked(network_rules={}).policy == SPEC.policy
    assert asked(network_rules={}).network_rules == {}


def test_a_stage_is_put_into_the_document_and_taken_out() -> None:
    assert asked(stage="b").policy == {"stages": {"a": {}}, "stage": "b"}
    assert asked(stage="").policy == {"stages": {"a": {}}, "stage": None}
    assert asked(policy={"stages": {"c": {}}}, stage="c").policy == {
        "stages": {"c": {}}, "stage": "c",
    }  # fmt: skip


def test_a_request_for_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        check(PolicyRequest(op_id="x" * 26))


def test_the_wall_time_of_a_policy_is_a_deadline() -> None:
    spec = SandboxSpec(policy={"resources": {"wall_time_s": 50}}, deadline_s=100.0)
    assert rules.times(spec).deadline_s == 50
    assert rules.times(SandboxSpec(deadline_s=100.0)).deadline_s == 100
