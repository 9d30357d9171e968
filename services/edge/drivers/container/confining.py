"""What a node's kernel enforces on containers on top of mounts and filters, where it can:
AppArmor profiles and LSM programs.

Owns: both for each sandbox, and telling what they deny. Does not own: which there are for
a policy (:mod:`services.edge.policy.plan`), putting a command under a profile (the agent).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from schemas.audit import Violation
from services.edge.drivers.base import Feature
from services.edge.machine import lsm, profiles
from services.edge.policy import apparmor
from services.edge.policy.plan import Plan
from shared.apparmor import Record
from shared.errors import DsecError
from shared.policies import Policy

Tell = Callable[[Violation], None]


@dataclass(frozen=True, slots=True)
class _Held:
    uid: str
    project: str
    policy: Policy
    confined: bool


def probed(probe: Callable[[], str]) -> Feature:
    """A feature by what a probe says, or by why it raises."""
    try:
        return Feature(True, probe())
    except DsecError as err:
        return Feature(False, err.message)


class Confining:
    """See the module. ``program``: the LSM programs' object file; ``tell`` is given every
    violation, without id and node."""

    def __init__(self, program: Path, tell: Tell) -> None:
        self._tell = tell
        self._paths = lsm.Paths(program)
        self._hearing: profiles.Hearing | None = None
        self._held: dict[str, _Held] = {}

    def features(self) -> dict[str, Feature]:
        """What the kernel has. Blocking."""
        return {
            "policy_lsm": probed(self._paths.probe),
            "policy_apparmor": probed(profiles.probe),
        }

    async def begin(self, uid: str, project: str, plan: Plan) -> None:
        """Puts a sandbox's profile into the kernel. Again is fine."""
        self._held[uid] = _Held(uid, project, plan.policy, plan.confines)
        if plan.confines:
            if self._hearing is None:
                self._hearing = profiles.Hearing(self._heard)
            text = apparmor.profile(profiles.name_of(uid), plan.policy)
            await asyncio.to_thread(profiles.load, text)

    def protect(self, uid: str, plan: Plan, *, group: Path, pid: int) -> None:
        """Protects paths of a sandbox that has begun: those of the root of ``pid`` from all
        in the control group ``group``. Again is fine."""
        if plan.hooks:
            held = self._held[uid]
            self._paths.begin(
                uid, group, pid, lsm.protected(plan.policy),
                heard=lambda found: self._held_off(held, found),
            )  # fmt: skip

    def end(self, uid: str) -> None:
        """The sandbox is over; one that has none is fine."""
        held = self._held.pop(uid, None)
        self._paths.end(uid)
        if held is not None and held.confined:
            profiles.remove(profiles.name_of(uid))

    def close(self) -> None:
        """Nothing is told any more."""
        self._paths.close()
        if self._hearing is not None:
            self._hearing.close()

    def _heard(self, uid: str, line: str, record: Record) -> None:
        held = self._held.get(uid)
        if held is not None:
            rule = apparmor.rule_of(held.policy, record.operation, record.name)
            self._say(
                held, Violation(
                    id="", at=0.0, node="", uid=uid, project="", source="apparmor",
                    verdict="denied", rule=rule, mechanism="AppArmor", subject=line,
                    path=record.name, actor={"pid": record.pid, "comm": record.comm},
                ),
            )  # fmt: skip

    def _held_off(self, held: _Held, found: lsm.Denial) -> None:
        self._say(
            held, Violation(
                id="", at=0.0, node="", uid=held.uid, project="", source="bpf_lsm",
                verdict="denied", rule=found.rule, mechanism="BPF LSM", action=found.action,
                path=found.path, subject=found.path,
                actor={"pid": found.pid, "uid": found.uid, "comm": found.comm},
            ),
        )  # fmt: skip

    def _say(self, held: _Held, found: Violation) -> None:
        self._tell(
            replace(found, at=time.time(), project=held.project, stage=held.policy.stage)
        )
