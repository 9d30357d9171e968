"""Run arguments: what is sent, and what is refused by name."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from libdsec import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    DSecRunArgs,
    DSecVMRunArgs,
    InvalidRequest,
)
from libdsec._command import command_request
from libdsec.args import seconds


def test_the_published_arguments_become_a_spec() -> None:
    args = DSecContainerRunArgs(
        container_image="py:3.11",
        memory_limit_mb=4096,
        cpu_cores_limit=4,
        ttl_running_stop=timedelta(minutes=5),
        network_rules={"pypi": True, "npm": False},
        init_user="root",
    )
    assert args.to_spec() == {
        "backend": "container",
        "container_image": "py:3.11",
        "memory_limit_mb": 4096,
        "cpu_cores_limit": 4,
        "ttl_running_stop": 300.0,
        "network_rules": {"pypi": True, "npm": False},
        "init_user": "root",
        "on_timeout": "stop",
        "qos": "best_effort",
    }
    assert args.validate().cpu_cores_limit == 4.0


def test_a_pair_is_request_and_limit() -> None:
    args = DSecRunArgs(backend="fake", cpu_cores_limit=(0.5, 2), memory_limit_mb=(64, 128))
    spec = args.validate()
    assert (spec.cpu_cores_request, spec.cpu_cores_limit) == (0.5, 2)
    assert (spec.memory_request_mb, spec.memory_limit_mb) == (64, 128)


def test_each_class_is_a_backend() -> None:
    assert DSecContainerRunArgs().backend == "container"
    assert DSecMicroVMRunArgs().backend == "microvm"
    assert DSecVMRunArgs().backend == "vm"
    assert DSecContainerRunArgs(backend="vm").backend == "container"


def test_what_a_policy_requires_is_required() -> None:
    policy = {"network": {"pypi": True}, "require": ["network"]}
    spec = DSecRunArgs(backend="fake", policy=policy).validate()
    assert (spec.policy, spec.require) == (policy, ["network"])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_limit_mb": -5}, "memory_limit_mb"),
        ({"memory_limit_mb": 64.5}, "memory_limit_mb"),
        ({"memory_limit_mb": (256, 128)}, "memory_limit_mb"),
        ({"memory_limit_mb": (1, 128)}, "memory_limit_mb"),
        ({"memory_limit_mb": (1, 2, 3)}, "memory_limit_mb"),
        ({"cpu_cores_limit": 0}, "cpu_cores_limit"),
        ({"cpu_cores_limit": 1e9}, "cpu_cores_limit"),
        ({"cpu_cores_limit": "4"}, "cpu_cores_limit"),
        ({"pids_limit": 0}, "pids_limit"),
        ({"disk_limit_mb": -1}, "disk_limit_mb"),
        ({"workdir": "relative"}, "workdir"),
        ({"ttl_running_stop": -1}, "ttl_running_stop"),
        ({"ttl_running_stop": "soon"}, "ttl_running_stop"),
        ({"deadline_s": float("inf")}, "deadline_s"),
        ({"on_timeout": "explode"}, "on_timeout"),
        ({"qos": "best"}, "qos"),
        ({"backend": "mainframe"}, "backend"),
        ({"init_user": ""}, "init_user"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DSecRunArgs(**{"backend": "fake", **changes}).validate()
    assert caught.value.field == field


def test_an_environment_is_named_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        DSecContainerRunArgs().validate()
    assert caught.value.field == "container_image"
    with pytest.raises(InvalidRequest) as caught:
        DSecContainerRunArgs(container_image="a", layers=["b"]).validate()
    assert caught.value.field == "layers"


def test_seconds() -> None:
    assert seconds(None, "x") is None
    assert seconds(timedelta(milliseconds=1500), "x") == 1.5
    for bad in (True, "1", float("nan")):
        with pytest.raises(InvalidRequest):
            seconds(bad, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "entries", "field"),
    [
        ("env", {"A": "x", "PORT": 80}, "env.PORT"),
        ("env", {"A=B": "x"}, "env.A=B"),
        ("env", {1: "x"}, "env.1"),
        ("env", {"A": b"x"}, "env.A"),
        ("labels", {"task": None}, "labels.task"),
        ("network_rules", {"pypi": "yes"}, "network_rules.pypi"),
        ("secrets", {"hub": {"hosts": "x"}}, "secrets.hub.hosts"),
    ],
)
def test_an_entry_that_is_wrong_is_named_by_its_key(
    name: str, entries: dict[Any, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        DSecRunArgs(backend="fake", **{name: entries}).validate()
    assert caught.value.field == field


def test_a_variable_of_a_command_that_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        command_request(["true"], timeout=None, env={"A": "x", "PORT": 80})  # type: ignore[dict-item]
    assert caught.value.field == "env.PORT"
