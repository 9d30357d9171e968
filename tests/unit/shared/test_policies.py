"""Policy documents: what is read, what is refused and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from shared import policies
from shared.errors import DsecError, InvalidRequest
from shared.policies.model import DENIABLE
from shared.policies.presets import PRESETS


def test_nothing_said_is_no_way_out_and_nothing_else() -> None:
    policy = policies.read(None, {})
    assert policy == policies.Policy() and not policy.reaches_out


def test_the_published_form_works() -> None:
    policy = policies.read(None, {"pypi": True, "npm": False})
    assert [(r.name, r.kind, r.allow) for r in policy.network] == [
        ("pypi", "service", True), ("npm", "service", False),
    ]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_policy_and_its_rules_can_be_changed(name: str) -> None:
    policy = policies.read({"preset": name, "network": {"pypi": False}}, {"npm": True})
    assert {r.text: r.allow for r in policy.network}.items() >= {"pypi": False, "npm": True}.items()
    assert set(policy.deny) <= set(DENIABLE) and policy.hidden


@pytest.mark.parametrize(
    ("text", "kind", "ports", "protocol"),
    [
        ("example.org", "domain", ((443, 443), (80, 80)), "any"),
        ("*.Example.org:8443", "domain", ((8443, 8443),), "any"),
        ("tcp:10.0.0.0/8:1-1023", "block", ((1, 1023),), "tcp"),
        ("udp:192.0.2.1", "block", ((0, 65535),), "udp"),
        ("2001:db8::/32", "block", ((0, 65535),), "any"),
        ("[2001:db8::1]:22", "block", ((22, 22),), "any"),
        ("go-proxy:443", "service", ((443, 443),), "any"),
    ],
)
def test_rules_are_read(text: str, kind: str, ports: Any, protocol: str) -> None:
    (rule,) = policies.read(None, {text: True}).network
    assert (rule.kind, rule.ports, rule.protocol) == (kind, ports, protocol)


def test_a_star_is_both_families() -> None:
    assert [r.block and r.block.version for r in policies.read(None, {"*": True}).network] == [4, 6]


def test_a_stage_comes_over_the_document() -> None:
    document = {
        "network": {"pypi": True}, "processes": {"deny": ["bpf"]}, "stage": "grade",
        "stages": {"grade": {"network": {"pypi": False}, "processes": {"deny": ["ptrace"]}}},
    }  # fmt: skip
    policy = policies.read(document, {})
    assert not policy.reaches_out and policy.deny == ("bpf", "ptrace")
    assert policies.read({**document, "stage": None}, {}).reaches_out


@pytest.mark.parametrize(
    ("document", "rules", "code", "field"),
    [
        ({"filez": {}}, {}, "unsupported", "policy.filez"),
        ({"files": {"hiden": []}}, {}, "unsupported", "policy.files.hiden"),
        ({"files": {"hidden": ["a"]}}, {}, "invalid_request", "policy.files.hidden[0]"),
        ({"files": {"protected": ["/a", "/../b"]}}, {}, "invalid_request",
         "policy.files.protected[1]"),
        ({"processes": {"deny": ["ptrce"]}}, {}, "unsupported", "policy.processes.deny[0]"),
        ({"processes": {"deny": ["ioctl:x"]}}, {}, "invalid_request", "policy.processes.deny[0]"),
        ({"resources": {"pids": 1}}, {}, "invalid_request", "policy.resources.pids"),
        ({"preset": "open"}, {}, "invalid_request", "policy.preset"),
        ({"require": ["filess"]}, {}, "unsupported", "policy.require[0]"),
        ({"stage": "x"}, {}, "invalid_request", "stage"),
        ({"stages": {"a": {"files": {}}}}, {}, "unsupported", "policy.stages.files"),
        ({"stages": {"a": {"network": {"x y": True}}}}, {}, "invalid_request",
         "policy.stages.x y"),
        ({}, {"pipy": True}, "invalid_request", "network_rules.pipy"),
        ({}, {"127.0.0.1": True}, "invalid_request", "network_rules.127.0.0.1"),
        ({}, {"169.254.169.254": True}, "invalid_request", "network_rules.169.254.169.254"),
        ({}, {"::ffff:10.0.0.1": True}, "invalid_request", "network_rules.::ffff:10.0.0.1"),
        ({}, {"a.example:70000": True}, "invalid_request", "network_rules.a.example:70000"),
        ({}, {"a.example:9-1": True}, "invalid_request", "network_rules.a.example:9-1"),
        ({}, {"10.0.0.1/8": True}, "invalid_request", "network_rules.10.0.0.1/8"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    document: dict[str, Any], rules: dict[str, bool], code: str, field: str
) -> None:
    with pytest.raises(DsecError) as caught:
        policies.read(document, rules)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize("number", [1 << 80, object()])
def test_what_no_message_holds_is_refused_by_name(number: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        policies.read({"resources": {"pids": number}}, {})
    assert caught.value.field == "policy.resources.pids"
