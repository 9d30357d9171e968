"""The compiler: a mechanism for every rule, or a refusal that names it."""

from __future__ import annotations

from typing import Any

import pytest

from services.edge.drivers.base import Feature
from services.edge.policy.plan import Plan, compile_policy
from shared import policies
from shared.errors import PolicyDenied

ALL = {
    "network_allow": Feature(True, "gate"), "policy_files": Feature(True, "mounts"),
    "policy_calls": Feature(True, "seccomp"), "policy_limits": Feature(True, "rlimit"),
    "pids_limit": Feature(True, "cgroup"), "exec": Feature(True, "agent"),
    "disk_limit": Feature(False, "no quota"),
}  # fmt: skip
EVERYTHING: dict[str, Any] = {
    "network": {"pypi": True, "10.0.0.0/8": False},
    "files": {"read_only": ["/usr"], "hidden": ["/a"], "protected": ["/b"]},
    "processes": {"deny": ["ptrace", "ioctl:0xC0C0586D", "exec:/bin/nc"]},
    "resources": {"pids": 10, "open_files": 64, "file_mb": 1, "output_bytes": 2048},
}


def plan(document: dict[str, Any], features: dict[str, Feature] = ALL) -> Plan:
    return compile_policy(policies.read(document, {}), features)


def test_every_rule_has_a_mechanism_and_says_which() -> None:
    made = plan(EVERYTHING)
    assert made.opens and made.calls
    assert set(made.enforcement) == {
        "network", "network.pypi", "network.10.0.0.0/8", "files.read_only", "files.hidden",
        "files.protected", "processes.ptrace", "processes.ioctl", "processes.exec",
        "resources.pids", "resources.open_files", "resources.file_mb", "resources.output_bytes",
    }  # fmt: skip
    assert all(made.enforcement.values())
    assert [m.kind for m in made.mounts] == ["read_only", "hidden", "protected", "noexec"]


@pytest.mark.parametrize(
    ("missing", "field"),
    [
        ("policy_files", "policy.files.read_only"), ("policy_calls", "policy.processes.deny"),
        ("policy_limits", "policy.resources.open_files"), ("pids_limit", "policy.resources.pids"),
    ],
)  # fmt: skip
def test_a_rule_without_a_mechanism_is_refused_by_name(missing: str, field: str) -> None:
    for features in ({**ALL, missing: Feature(False, "not here")},
                     {k: v for k, v in ALL.items() if k != missing}):  # fmt: skip
        with pytest.raises(PolicyDenied) as caught:
            plan(EVERYTHING, features)
        assert caught.value.field == field


def test_what_cannot_be_reached_takes_nothing_away_unless_it_is_required() -> None:
    features = {**ALL, "network_allow": Feature(False, "no programs")}
    made = plan({"network": {"pypi": True}}, features)
    assert not made.opens and "not reachable: no programs" in made.enforcement["network"]
    with pytest.raises(PolicyDenied) as caught:
        plan({"network": {"pypi": True}, "require": ["network"]}, features)
    assert caught.value.field == "policy.require"


def test_what_is_required_must_be_there() -> None:
    assert plan({"files": {"hidden": ["/a"]}, "require": ["files", "files.hidden"]})
    with pytest.raises(PolicyDenied):
        plan({"files": {"hidden": ["/a"]}, "require": ["files.protected"]})


def test_a_quota_that_is_not_there_is_refused() -> None:
    with pytest.raises(PolicyDenied) as caught:
        plan({"resources": {"disk_mb": 10}})
    assert caught.value.field == "policy.resources.disk_mb" and "no quota" in caught.value.message


def test_datagrams_are_said_not_to_leave() -> None:
    told = plan({"network": {"udp:192.0.2.1": True}}).enforcement
    assert told["network.udp:192.0.2.1"].startswith("not reachable")


def test_the_root_is_laid_before_what_is_in_it() -> None:
    made = plan({"files": {"read_only": ["/a/b", "/", "/c"], "hidden": ["/d"]}})
    assert [m.path for m in made.mounts] == ["/", "/a/b", "/c", "/d"]


def test_what_the_kernel_has_beside_mounts_comes_on_top_and_is_told() -> None:
    more = {
        **ALL, "policy_apparmor": Feature(True, "AppArmor"), "policy_lsm": Feature(True, "BPF LSM"),
        "sensors": Feature(True, "fanotify"),
    }  # fmt: skip
    document = {**EVERYTHING, "files": {**EVERYTHING["files"], "watched": ["/t"]}}
    made = plan(document, more)
    assert made.confines and made.hooks
    assert made.enforcement["files.hidden"] == "mounts, AppArmor, BPF LSM"
    assert made.enforcement["processes.ptrace"] == "seccomp, AppArmor"
    assert made.enforcement["processes.ioctl"] == "seccomp"
    assert made.enforcement["files.watched"] == "fanotify"
    bare = plan({}, more)
    assert bare.confines and not bare.hooks
    assert not plan(EVERYTHING).confines


def test_what_cannot_be_watched_is_refused() -> None:
    with pytest.raises(PolicyDenied) as caught:
        plan({"files": {"watched": ["/t"]}})
    assert caught.value.field == "policy.files.watched"
