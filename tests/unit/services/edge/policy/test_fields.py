"""Every field of a policy document has a mechanism with a name, or is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from schemas.policy import Files, Limits, PolicyDocument, Processes, Stage
from services.edge.drivers.base import Feature
from services.edge.policy.plan import compile_policy
from shared import policies
from shared.errors import PolicyDenied
from shared.policies.model import DENIABLE
from shared.policies.presets import PRESETS

CALLS = ("policy_calls", "seccomp, each told")
OF_FILES = {
    "read_only": ("policy_files", "mounts"), "hidden": ("policy_files", "mounts"),
    "protected": ("policy_files", "mounts"), "watched": ("sensors", "fanotify"),
}  # fmt: skip
OF_LIMITS: dict[str, tuple[int, str, str]] = {
    "pids": (64, "pids_limit", "cgroup v1"), "open_files": (64, "policy_limits", "rlimit"),
    "file_mb": (1, "policy_limits", "rlimit"), "output_bytes": (2048, "exec", "agent"),
    "wall_time_s": (60, "", "deadline of the edge"),
    "disk_mb": (64, "disk_limit", "project quota"), "inodes": (1000, "disk_limit", "project quota"),
}  # fmt: skip
"""An example, the feature that it needs (none: of every backend), what enforces it."""
OF_CALLS = {
    **{name: (*CALLS, f"processes.{name}") for name in DENIABLE},
    "signals": ("policy_signals", "PID namespace", "processes.signals"),
    "ioctl:0xC0C0586D": (*CALLS, "processes.ioctl"),
    "exec:/bin/nc": ("policy_files", "mounts", "processes.exec"),
}
NO_RULES = {"preset", "require", "stages", "stage"}
"""They say which rules there are, or that there must be some."""
FEATURES = {
    "network_allow": Feature(True, "gate"),
    **{
        feature: Feature(True, named)
        for feature, named in [
            *OF_FILES.values(), *(row[1:] for row in OF_LIMITS.values()),
            *(row[:2] for row in OF_CALLS.values()),
        ]
        if feature
    },
}  # fmt: skip


def rows() -> Iterator[Any]:
    """Document, the rule, its feature, what enforces it, the field that is refused."""
    for name, (feature, named) in OF_FILES.items():
        document = {"files": {name: ["/a"]}}
        yield pytest.param(
            document, f"files.{name}", feature, named, f"policy.files.{name}", id=f"files.{name}"
        )
    for name, (value, feature, named) in OF_LIMITS.items():
        rule = f"resources.{name}"
        yield pytest.param(
            {"resources": {name: value}}, rule, feature, named, f"policy.{rule}", id=rule
        )
    for name, (feature, named, rule) in OF_CALLS.items():
        field = "policy.processes.deny"
        yield pytest.param({"processes": {"deny": [name]}}, rule, feature, named, field, id=name)
        staged = {"stages": {"s": {"processes": {"deny": [name]}}}, "stage": "s"}
        yield pytest.param(staged, rule, feature, named, field, id=f"staged {name}")


def compiled(document: dict[str, Any], features: dict[str, Feature]) -> dict[str, str]:
    return dict(compile_policy(policies.read(document, {}), features).enforcement)


def test_the_table_has_every_field_there_is() -> None:
    """Who adds a field says here what enforces it."""
    fields = {kind: set(kind.__struct_fields__) for kind in (Files, Limits, Processes, Stage)}
    assert fields[Files] == set(OF_FILES) and fields[Limits] == set(OF_LIMITS)
    assert fields[Processes] == {"deny"} and fields[Stage] == {"network", "processes"}
    document = set(PolicyDocument.__struct_fields__)
    assert document == {"network", "files", "processes", "resources"} | NO_RULES
    assert {name for name in OF_CALLS if ":" not in name} == set(DENIABLE)


@pytest.mark.parametrize(("document", "rule", "feature", "named", "field"), list(rows()))
def test_a_field_has_its_mechanism_or_is_refused_by_name(
    document: dict[str, Any], rule: str, feature: str, named: str, field: str
) -> None:
    required = {**document, "require": [rule]}
    for asked in (document, required):
        assert compiled(asked, FEATURES)[rule] == named
        if not feature:
            continue
        without = {name: found for name, found in FEATURES.items() if name != feature}
        for features in (without, {**without, feature: Feature(False, "not here")}):
            with pytest.raises(PolicyDenied) as caught:
                compiled(asked, features)
            assert caught.value.field == field
    with pytest.raises(PolicyDenied) as caught:  # required, and no rule says what
        compiled({"require": [rule]}, FEATURES)
    assert caught.value.field == "policy.require"


def test_a_mechanism_that_says_no_name_is_called_by_its_feature() -> None:
    features = {name: Feature(True) for name in FEATURES}
    for row in rows():
        document, rule, feature, named, _field = row.values
        assert compiled(document, features)[rule] == (feature or named)


@pytest.mark.parametrize("name", PRESETS)
def test_whatever_a_preset_says_has_a_mechanism(name: str) -> None:
    told = compiled({"preset": name}, FEATURES)
    assert all(told.values())
    document = msgspec.to_builtins(PRESETS[name])
    assert {f"processes.{call}" for call in document["processes"]["deny"]} <= set(told)


def test_network_rules_are_enforced_or_reach_nothing() -> None:
    """Less is allowed than asked, so a start is refused only where they are required."""
    shut = {**FEATURES, "network_allow": Feature(False, "no programs")}
    for document in ({"network": {"pypi": True}},
                     {"stages": {"s": {"network": {"pypi": True}}}, "stage": "s"}):  # fmt: skip
        assert compiled(document, FEATURES)["network"] == "gate"
        assert "not reachable" in compiled(document, shut)["network"]
        with pytest.raises(PolicyDenied) as caught:
            compiled({**document, "require": ["network"]}, shut)
        assert caught.value.field == "policy.require"
    assert compiled({"network": {"pypi": False}}, shut)["network"]
