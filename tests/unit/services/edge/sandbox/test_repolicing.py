"""What a request changes of a spec, and of a sandbox: all of it or nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from schemas.control import PolicyRequest
from schemas.sandbox import ResolvedSpec, SandboxSpec, Tightening
from services.edge.drivers.base import BackendReport, Feature, Handle, StartSpec
from services.edge.journal import records
from services.edge.sandbox import repolicing, rules
from services.edge.sandbox.ending import Ending
from services.edge.sandbox.repolicing import changed, check, enforce, note, tighten
from shared.errors import DsecError, InvalidRequest, SandboxDied, Unavailable, Unsupported

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


class Driver:
    """Takes policies, or fails as it is told to."""

    def __init__(self) -> None:
        self.in_force: list[tuple[str, ...]] = []
        self.errors: list[DsecError | None] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def set_policy(self, handle: Handle, spec: StartSpec) -> Handle:
        await self.may_go_on.wait()
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        self.in_force.append(spec.policy.deny)
        return handle

    def report_to(self, tell: object) -> None: ...
    def secrets_from(self, vault: object) -> None: ...


class Node:
    """A sandbox that denies ptrace, and what an edge does with it."""

    def __init__(self) -> None:
        spec = SandboxSpec(policy={"processes": {"deny": ["ptrace"]}})
        resolved = ResolvedSpec(spec=spec, layers=[])
        item: Any = SimpleNamespace(uid="u1", project="p")
        self.driver = Driver()
        self.ended: list[Ending] = []
        self.written: list[Any] = []
        self.error: DsecError | None = None
        handle = Handle("u1", "fake", {}, {})
        self.sandbox: Any = SimpleNamespace(
            uid="u1", backend="fake", driver=self.driver, repolicing=asyncio.Lock(),
            handle=handle, present=lambda: handle, observation=lambda: None,
            accepted=_Accepted(item, resolved), end=self.ended.append,
        )  # fmt: skip
        features = {"policy_calls": Feature(True, "seccomp")}
        self.context: Any = SimpleNamespace(
            observer=self, report=lambda _name: BackendReport(True, "", features)
        )

    async def emit(self, _observations: list[Any], *changes: Any) -> None:
        if self.error is not None:
            raise self.error
        self.written += changes

    @property
    def denied(self) -> Any:
        return self.sandbox.accepted.resolved.spec.policy["processes"]["deny"]

    async def deny(self, *names: str) -> Handle:
        request = PolicyRequest(op_id="x" * 26, policy={"processes": {"deny": list(names)}})
        return await enforce(self.sandbox, self.context, request)


@dataclass(frozen=True)
class _Accepted:
    item: Any
    resolved: ResolvedSpec


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(repolicing, "replace", _replace)
    monkeypatch.setattr(records, "repoliced", lambda uid, accepted, handle: accepted)
    monkeypatch.setattr(records, "respecified", lambda uid, accepted: accepted)
    return Node()


def _replace(what: Any, **changes: Any) -> Any:
    by = dataclasses.replace if dataclasses.is_dataclass(what) else structs.replace
    return by(what, **changes)


async def test_a_change_that_is_not_journalled_is_taken_back(node: Node) -> None:
    node.error = Unavailable("the journal is full")
    with pytest.raises(Unavailable):
        await node.deny("bpf")
    assert node.driver.in_force == [("bpf",), ("ptrace",)]
    assert node.denied == ["ptrace"] and not node.ended
    node.driver.errors = [None, Unavailable("no answer")]
    with pytest.raises(Unavailable):
        await node.deny("bpf")
    assert [e.observed for e in node.ended] == ["failed"]


async def test_a_sandbox_with_half_a_policy_ends(node: Node) -> None:
    node.driver.errors = [SandboxDied("half", cause="internal")]
    with pytest.raises(SandboxDied):
        await node.deny("bpf")
    assert [(e.observed, e.cause) for e in node.ended] == [("failed", "internal")]
    node.driver.errors = [Unsupported("no", field="policy.files")]
    with pytest.raises(Unsupported):
        await node.deny("bpf")
    assert len(node.ended) == 1 and node.denied == ["ptrace"]


async def test_a_client_that_leaves_splits_no_change(node: Node) -> None:
    node.driver.may_go_on.clear()
    asked = asyncio.ensure_future(node.deny("bpf"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    node.driver.may_go_on.set()
    async with node.sandbox.repolicing:
        pass
    assert node.driver.in_force == [("bpf",)] and node.denied == ["bpf"]
    assert node.written == [node.sandbox.accepted]


def stricter(node: Node) -> StartSpec:
    """What the next edge would put into force, from what is written."""
    accepted = node.written[-1]
    return rules.start_spec(accepted.item, accepted.resolved, [])


async def test_a_tightening_stays_under_whatever_is_set_later(node: Node) -> None:
    node.written.append(note(node.sandbox, Tightening(deny=["bpf"])))
    assert stricter(node).policy.deny == ("ptrace", "bpf")  # before it is in force
    await tighten(node.sandbox, node.context)
    assert node.driver.in_force == [("ptrace", "bpf")]
    await node.deny()
    assert node.driver.in_force[-1] == ("bpf",)
    note(node.sandbox, Tightening(deny=["mount"]))
    await tighten(node.sandbox, node.context)
    assert stricter(node).policy.deny == ("bpf", "mount")


async def test_a_tightening_that_comes_during_a_change_is_not_lost(node: Node) -> None:
    node.driver.may_go_on.clear()
    change = asyncio.ensure_future(node.deny("mount"))
    for _ in range(5):
        await asyncio.sleep(0)
    note(node.sandbox, Tightening(deny=["bpf"]))
    tightening = asyncio.ensure_future(tighten(node.sandbox, node.context))
    node.driver.may_go_on.set()
    await asyncio.gather(change, tightening)
    assert node.driver.in_force[-1] == ("mount", "bpf")
    assert stricter(node).policy.deny == ("mount", "bpf")


async def test_a_sandbox_that_cannot_be_made_stricter_ends(node: Node) -> None:
    note(node.sandbox, Tightening(deny=["bpf"]))
    node.driver.errors = [Unavailable("no answer")]
    await tighten(node.sandbox, node.context)
    assert [(e.observed, e.cause) for e in node.ended] == [("stopped", "policy_violation")]
