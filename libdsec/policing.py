"""What a sandbox offers of its policy while it runs.

Owns: the calls. Does not own: what a rule means (the services judge).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libdsec import _ids
from libdsec._core import Core
from libdsec._wire import PolicyReply, PolicyRequest
from libdsec.managers import document_of


class HasPolicy:
    """Changes of a running sandbox's policy."""

    _core: Core
    project: str

    async def _answer(self, verb: str, request: Any, reply_type: type[Any]) -> Any:
        raise NotImplementedError

    async def set_network(self, rules: Mapping[str, bool]) -> Mapping[str, str]:
        """Replaces the network rules; returns what enforces which. In force when it
        returns: connections that are no longer allowed were reset. Resumes nothing."""
        return await self._enforce(network_rules=dict(rules))

    async def set_policy(self, policy: Mapping[str, Any] | str) -> Mapping[str, str]:
        """Replaces the policy document (a name: by what it means now), as
        :meth:`set_network`. Protected paths and limits stay as they were when it started,
        and denied calls are those of commands to come. Raises ``Unsupported`` or
        ``PolicyDenied`` naming the field; then the old one is in force."""
        return await self._enforce(policy=await document_of(self._core, self.project, policy))

    async def set_stage(self, name: str) -> Mapping[str, str]:
        """Puts a stage of the policy document into force; "" for none."""
        return await self._enforce(stage=name)

    async def _enforce(self, **what: Any) -> Mapping[str, str]:
        request = PolicyRequest(op_id=_ids.new(), **what)
        reply: PolicyReply = await self._answer("policy", request, PolicyReply)
        return reply.enforcement
