"""Policies of running containers: the driver port's optional ``Enforcing``.

Owns: the plan of a spec on this node, changes while a sandbox runs, budgets of output.
Does not own: putting a plan into force (:mod:`.enforcing`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from services.edge.drivers.base import BackendReport, ExecSpec, Feature, Handle, StartSpec
from services.edge.drivers.container.deaths import Sandbox
from services.edge.drivers.container.enforcing import Enforcing, Tell
from services.edge.drivers.container.targets import target_of
from services.edge.drivers.policing import Vault
from services.edge.policy.plan import Plan

PARTS = ("network", "files", "processes", "resources")
"""Beginnings of the names of what a policy enforces."""


class PolicyOfContainers(ABC):
    """See the module."""

    _enforcing: Enforcing
    _features: Mapping[str, Feature]

    @abstractmethod
    async def probe(self) -> BackendReport: ...

    @abstractmethod
    def _sandbox(self, handle: Handle) -> Sandbox: ...

    async def _plan(self, spec: StartSpec) -> Plan:
        if not self._features:
            await self.probe()
        return self._enforcing.plan(spec, self._features)

    async def set_policy(self, handle: Handle, spec: StartSpec) -> Handle:
        sandbox = self._sandbox(handle)
        plan = await self._plan(spec)
        target = target_of(
            spec, handle.data, agent=sandbox.agent, groups=sandbox.groups
        )
        await self._enforcing.change(target, plan)
        kept = {k: v for k, v in handle.enforcement.items() if not k.startswith(PARTS)}
        sandbox.handle = replace(handle, enforcement={**kept, **plan.enforcement})
        return sandbox.handle

    def secrets_from(self, vault: Vault) -> None:
        self._enforcing.vault = vault

    def report_to(self, tell: Tell) -> None:
        self._enforcing.tell = tell

    def _within_budget(self, handle: Handle, spec: ExecSpec) -> ExecSpec:
        most = self._enforcing.limit_of(handle.uid)
        if most is None or spec.output_limit_bytes <= most:
            return spec
        return msgspec.structs.replace(spec, output_limit_bytes=most)
