"""Putting a plan into force anew, where the sandbox is in the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from schemas.audit import Violation
from services.edge.agent.client import AgentClient
from services.edge.drivers.base import Feature
from services.edge.drivers.container import enforcing
from services.edge.drivers.container.enforcing import Enforcing
from services.edge.drivers.container.settings import ContainerSettings
from services.edge.drivers.container.targets import Target
from services.edge.machine.cgroups import Groups
from services.edge.policy.plan import compile_policy
from shared import policies
from shared.errors import Conflict

PLAN = compile_policy(
    policies.read(None, {"a.example": True}), {"network_allow": Feature(True, "gate")}
)


class Taken:
    """A way out whose place in the sandbox is taken."""

    def __init__(self) -> None:
        self.shuts: list[str] = []
        self.opens = 0

    async def open(self, uid: str, project: str, **_: Any) -> None:
        self.opens += 1
        raise Conflict("a process has port 53 of the gate", field="network_rules")

    def forget(self, uid: str) -> None:
        self.shut(uid)

    def shut(self, uid: str) -> None:
        self.shuts.append(uid)


@pytest.mark.parametrize("recovers", [True, False])
async def test_a_sandbox_that_took_the_gates_place_lives_on_without_a_way_out(
    recovers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, told = Enforcing(ContainerSettings(node="n", state_dir=tmp_path)), list[Violation]()
    made.tell, taken = told.append, Taken()
    monkeypatch.setattr(made, "egress", taken)
    monkeypatch.setattr(enforcing, "GATE_AGAIN_S", 0.0)
    groups = cast(Groups, type("G", (), {"v2": Path("/none/x")})())
    target = Target("u", "p", cast(AgentClient, None), "c", 1, groups)
    if not recovers:
        with pytest.raises(Conflict):
            await made.begin(target, PLAN)
        assert taken.shuts == ["u"] and made.limit_of("u") is None
        return
    await made.begin(target, PLAN, recovers=True)
    assert taken.shuts == [] and taken.opens == enforcing.GATE_TRIES
    assert [(v.uid, v.source, v.rule) for v in told] == [("u", "policy", "network.gate")]
