"""Specs: each fault is named as the caller wrote it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.base import WireError
from schemas.sandbox import SandboxSpec
from services.auth.validate import MAX_ENV, MAX_LABELS, judge

IMAGE = {"container_image": "py:3.11"}


@pytest.mark.parametrize(
    ("spec", "code", "field"),
    [
        ({}, "invalid_request", "container_image"),
        ({"backend": "microvm"}, "invalid_request", "container_image"),
        ({**IMAGE, "layers": ["a"]}, "invalid_request", "layers"),
        ({**IMAGE, "backend": "abacus"}, "invalid_request", "backend"),
        ({**IMAGE, "memory_limit_mb": -5}, "invalid_request", "memory_limit_mb"),
        ({**IMAGE, "memory_limit_mb": 1e30}, "invalid_request", "memory_limit_mb"),
        ({**IMAGE, "memory_limit_mb": "8g"}, "invalid_request", "memory_limit_mb"),
        ({**IMAGE, "memory_request_mb": 65, "memory_limit_mb": 64}, "invalid_request",
         "memory_request_mb"),
        ({**IMAGE, "cpu_cores_limit": 0}, "invalid_request", "cpu_cores_limit"),
        ({**IMAGE, "cpu_cores_limit": 1e9}, "invalid_request", "cpu_cores_limit"),
        ({**IMAGE, "cpu_cores_request": 2, "cpu_cores_limit": 1}, "invalid_request",
         "cpu_cores_request"),
        ({**IMAGE, "disk_limit_mb": 0}, "invalid_request", "disk_limit_mb"),
        ({**IMAGE, "pids_limit": 0}, "invalid_request", "pids_limit"),
        ({**IMAGE, "workdir": "relative"}, "invalid_request", "workdir"),
        ({**IMAGE, "env": {"A": "\0"}}, "invalid_request", "env.A"),
        ({**IMAGE, "env": {f"K{i}": "" for i in range(MAX_ENV + 1)}}, "invalid_request", "env"),
        ({**IMAGE, "env": {"A": "x" * 200_000}}, "invalid_request", "env"),
        ({**IMAGE, "labels": {f"k{i}": "" for i in range(MAX_LABELS + 1)}}, "invalid_request",
         "labels"),
        ({**IMAGE, "init_user": "a/b"}, "invalid_request", "init_user"),
        ({**IMAGE, "ttl_running_stop": -1}, "invalid_request", "ttl_running_stop"),
        ({**IMAGE, "deadline_s": 0}, "invalid_request", "deadline_s"),
        ({**IMAGE, "on_timeout": "explode"}, "invalid_request", "on_timeout"),
        ({**IMAGE, "network_rules": {"pypi": "yes"}}, "invalid_request", "network_rules.pypi"),
        ({**IMAGE, "env": {"A=B": "x"}}, "invalid_request", "env.A=B"),
        ({**IMAGE, "env": {"A": "x", "PORT": 80, "Z": "x"}}, "invalid_request", "env.PORT"),
        ({**IMAGE, "env": {"A": "x", "k" * 200: 1}}, "invalid_request", "env." + "k" * 64),
        ({**IMAGE, "env": ["A=x"]}, "invalid_request", "env"),
        ({**IMAGE, "labels": {"task": None}}, "invalid_request", "labels.task"),
        ({"layers": ["ok", ""]}, "invalid_request", "layers[1]"),
        ({**IMAGE, "source": "01k2h7v8n0abcdefghjkmnpqrs"}, "invalid_request", "source"),
        ({**IMAGE, "node": "n1"}, "unsupported", "node"),
        ({**IMAGE, "require": ["teleport"]}, "unsupported", "require"),
        ({**IMAGE, "policy": {"network": {"pipy": True}}}, "invalid_request",
         "policy.network.pipy"),
        ({**IMAGE, "policy": {"mounts": ["/"]}}, "unsupported", "policy.mounts"),
        ({**IMAGE, "policy": {"require": ["teleport"]}}, "unsupported", "policy.require[0]"),
        ({**IMAGE, "network_rules": {"127.0.0.1": True}}, "invalid_request",
         "network_rules.127.0.0.1"),
        ({**IMAGE, "options": {"x": "y" * 70_000}}, "invalid_request", "options"),
        ({**IMAGE, "routes": {"bus": 0}}, "invalid_request", "routes.bus"),
        ({**IMAGE, "routes": {"Bus": 1}}, "invalid_request", "routes.Bus"),
        ({**IMAGE, "routes": {"bus": 1, "model": 1}}, "invalid_request", "routes"),
        ({**IMAGE, "routes": {f"r{i}": i + 1 for i in range(17)}}, "invalid_request", "routes"),
        ({**IMAGE, "privileged": True}, "unsupported", "privileged"),
        ({**IMAGE, "env": {"A": "x" * 600_000}}, "invalid_request", "payload"),
    ],
)  # fmt: skip
def test_a_bad_spec_names_its_field(spec: dict[str, Any], code: str, field: str) -> None:
    error = judge(json.dumps(spec).encode())
    assert isinstance(error, WireError)
    assert (error.code, error.field) == (code, field)


@pytest.mark.parametrize("mount", ["/var/run/docker.sock", "/", "/proc", "../.."])
@pytest.mark.parametrize("name", ["mounts", "volumes", "binds"])
def test_host_paths_are_never_mounted(mount: str, name: str) -> None:
    """(S01)"""
    error = judge(json.dumps({**IMAGE, name: [mount]}).encode())
    assert isinstance(error, WireError)
    assert (error.code, error.field) == ("unsupported", name)


@pytest.mark.parametrize(
    "spec",
    [
        IMAGE,
        {"layers": ["base", "workspace"]},
        {"backend": "fake"},
        {"backend": "fncall"},
        {**IMAGE, "network_rules": {"pypi": True, "npm": False}, "init_user": "root"},
        {**IMAGE, "policy": {}, "require": ["exec", "pause", "routes"]},
        {**IMAGE, "routes": {"bus": 4222, "model": 8000}},
        {**IMAGE, "policy": {"files": {}, "require": []}},
        {**IMAGE, "memory_request_mb": 64, "memory_limit_mb": 64},
    ],
)
def test_a_good_spec_passes_unchanged(spec: dict[str, Any]) -> None:
    judged = judge(json.dumps(spec).encode())
    assert isinstance(judged, SandboxSpec)
    for name, value in spec.items():
        assert getattr(judged, name) == value


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(SandboxSpec.__struct_fields__) | st.text(max_size=8)


@given(st.dictionaries(fields, json_values, max_size=5) | json_values)
def test_whatever_comes_is_judged(spec: object) -> None:
    judged = judge(json.dumps(spec).encode())
    assert isinstance(judged, SandboxSpec | WireError)


def test_a_spec_nested_too_deeply_is_refused() -> None:
    raw = b'{"backend": "fake", "options": {"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}}"
    error = judge(raw)
    assert isinstance(error, WireError)
    assert error.code == "invalid_request"
