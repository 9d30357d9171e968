"""A change of a running container's policy: as a whole, or not at all."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.edge.drivers.base import Feature
from services.edge.drivers.container.enforcing import Enforcing
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.targets import Target
from services.edge.policy.plan import Plan, compile_policy
from shared import policies
from shared.errors import CapacityExhausted, DsecError, SandboxDied, Unavailable
from shared.policies import Policy

ADDRESS, OTHER = "192.0.2.1", "192.0.2.2"
FEATURES = {"network_allow": Feature(True, "gate"), "policy_calls": Feature(True, "seccomp")}
Errors = list[DsecError | None]


def plan(address: str | None, *denied: str) -> Plan:
    rules = {address: True} if address else {}
    return compile_policy(policies.read({"processes": {"deny": list(denied)}}, rules), FEATURES)


class Agent:
    """Applies what it gets; an error comes after it did, as a lost answer does."""

    def __init__(self) -> None:
        self.lost = False
        self.errors: Errors = []
        self.applied: list[bytes] = []

    async def policy(self, payload: bytes, _ask: Any) -> None:
        self.applied.append(payload)
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error


class Egress:
    """Ways out; a change that fails leaves the old one."""

    def __init__(self) -> None:
        self.errors: Errors = []
        self.open_to: dict[str, Policy] = {}

    def check(self, policy: Policy) -> None: ...

    def unprepare(self, _container: str) -> None: ...

    def has(self, uid: str) -> bool:
        return uid in self.open_to

    def forget(self, uid: str) -> None:
        self.shut(uid)

    def shut(self, uid: str) -> None:
        self.open_to.pop(uid, None)

    def change(self, uid: str, policy: Policy) -> None:
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.open_to[uid] = policy

    async def open(self, uid: str, _project: str, *, policy: Policy, **_where: Any) -> None:
        self.change(uid, policy)


class Node:
    """A sandbox with the plan ``first``."""

    def __init__(self, folder: Path) -> None:
        self.agent, self.egress = Agent(), Egress()
        self.enforcing = Enforcing(ContainerSettings(node="n1", state_dir=folder))
        self.enforcing.egress = self.egress  # type: ignore[assignment]
        agent: Any = self.agent
        groups: Any = SimpleNamespace(v2="/group/work")
        self.target = Target("u1", "p", agent, "c1", 1, groups)

    def is_as(self, first: Plan) -> bool:
        """Whether ``first`` is in force, as a whole."""
        held = self.enforcing._held["u1"]
        return (
            held.plan is first
            and bool(self.agent.applied[-1]) is first.calls is (held.asking is not None)
            and self.egress.open_to.get("u1") is (first.policy if first.opens else None)
        )


@pytest.fixture
def node(tmp_path: Path) -> Node:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("no table of system calls")
    return Node(tmp_path)


@pytest.mark.parametrize("first", [plan(None), plan(ADDRESS, "ptrace")])
async def test_a_change_that_fails_leaves_the_old_policy_in_force(node: Node, first: Plan) -> None:
    await node.enforcing.begin(node.target, first)
    before = node.agent.applied[-1:] or [b""]
    node.egress.errors = [CapacityExhausted("no room")]
    with pytest.raises(CapacityExhausted):
        await node.enforcing.change(node.target, plan(OTHER, "bpf"))
    assert node.is_as(first) and node.agent.applied[-1:] == before
    node.agent.errors = [Unavailable("no answer")]
    with pytest.raises(Unavailable):
        await node.enforcing.change(node.target, plan(OTHER, "bpf"))
    assert node.is_as(first) and node.agent.applied[-1:] == before
    await node.enforcing.change(node.target, second := plan(OTHER, "bpf"))
    assert node.is_as(second)
    node.enforcing.end("u1")


async def test_where_the_old_policy_cannot_be_the_sandbox_is_to_end(node: Node) -> None:
    await node.enforcing.begin(node.target, plan(ADDRESS))
    node.egress.errors = [CapacityExhausted("no room"), CapacityExhausted("no room")]
    with pytest.raises(SandboxDied) as caught:
        await node.enforcing.change(node.target, plan(OTHER, "bpf"))
    assert caught.value.cause == "internal"
    node.agent.lost = True  # then its end is told by whom it is found out
    node.agent.errors = [Unavailable("lost"), Unavailable("lost")]
    with pytest.raises(Unavailable):
        await node.enforcing.change(node.target, plan(OTHER, "bpf"))
    node.enforcing.end("u1")
