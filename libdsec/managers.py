"""Managers: projects, keys, grants, quotas, policies, nodes.

Owns: calls of one shape (``create get list delete``). Does not own: what they mean;
the services do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from libdsec import _ids
from libdsec._core import Core
from libdsec._manager import Manager, make, present
from libdsec._wire import (
    GrantCreate,
    GrantDelete,
    IamQuery,
    KeyCreate,
    KeyDelete,
    KeyInfo,
    Limits,
    NodeCommand,
    NodeInfo,
    NodeList,
    Ok,
    PolicyCreate,
    PolicyDelete,
    PolicyInfo,
    ProjectCreate,
    ProjectDelete,
    ProjectInfo,
    QuotaCreate,
    QuotaInfo,
)
from libdsec.args import Seconds, seconds
from libdsec.errors import NotFound


class Projects(Manager):
    """``client.projects``. A child project is bounded by all above it."""

    _entity = "project"

    async def create(
        self, name: str, *, parent: str | None = None, id: str | None = None
    ) -> ProjectInfo:
        """Makes a child of ``parent`` (default: the client's project)."""
        request = make(ProjectCreate, request_id=_ids.new(), name=name, id=id)
        reply = await self._change("create", request, project=parent)
        return present(reply.project, "project")  # type: ignore[no-any-return]

    async def get(self, id: str) -> ProjectInfo:
        """One project. Raises ``NotFound``."""
        found = next((p for p in await self.list() if p.id == id), None)
        if found is None:
            raise NotFound(f"there is no project {id!r}", field="id")
        return found

    async def list(self) -> Sequence[ProjectInfo]:
        """The client's project and all below it."""
        return (await self._read("list", IamQuery())).projects or []

    async def delete(self, id: str) -> None:
        """Removes an empty project."""
        await self._change("delete", make(ProjectDelete, request_id=_ids.new(), id=id))


class Keys(Manager):
    """``client.keys``. A key is a principal of its own."""

    _entity = "key"

    async def create(
        self,
        name: str = "key",
        *,
        project: str | None = None,
        grants: Sequence[str] = (),
        kind: Literal["user", "service", "agent", "node"] = "user",
        node: str | None = None,
        expires_in_s: Seconds | None = None,
    ) -> KeyInfo:
        """Makes a key with ``grants`` (``entity.verb``) in ``project``; ``.secret`` is
        shown this once."""
        request = make(
            KeyCreate,
            request_id=_ids.new(),
            name=name,
            grants=list(grants),
            kind=kind,
            node=node,
            expires_in_s=seconds(expires_in_s, "expires_in_s"),
        )
        reply = await self._change("create", request, project=project)
        return present(reply.key, "key")  # type: ignore[no-any-return]

    async def list(self, *, project: str | None = None) -> Sequence[KeyInfo]:
        """The keys of a project, without their secrets."""
        reply = await self._read("list", make(IamQuery, project=project), project=project)
        return reply.keys or []

    async def delete(self, id: str, *, project: str | None = None) -> None:
        """Revokes a key; its connections end."""
        request = make(KeyDelete, request_id=_ids.new(), id=id)
        await self._change("delete", request, project=project)


class Grants(Manager):
    """``client.grants``: what principals may do, in a project and all below it."""

    _entity = "grant"

    async def create(
        self, principal: str, grants: Sequence[str], *, project: str | None = None
    ) -> None:
        """Gives grants; only those one holds."""
        request = make(GrantCreate, request_id=_ids.new(), principal=principal, grants=list(grants))
        await self._change("create", request, project=project)

    async def list(
        self, *, principal: str | None = None, project: str | None = None
    ) -> Sequence[str]:
        """The grants of a principal (default: one's own)."""
        query = make(IamQuery, principal=principal, project=project)
        return (await self._read("list", query, project=project)).grants or []

    async def delete(
        self, principal: str, grants: Sequence[str], *, project: str | None = None
    ) -> None:
        """Takes grants back."""
        request = make(GrantDelete, request_id=_ids.new(), principal=principal, grants=list(grants))
        await self._change("delete", request, project=project)


class Quotas(Manager):
    """``client.quotas``. A quota bounds a project and all below it together."""

    _entity = "quota"

    async def create(
        self,
        *,
        project: str,
        sandboxes: int | None = None,
        cores: float | None = None,
        memory_mb: int | None = None,
        creations_per_s: float | None = None,
    ) -> QuotaInfo | None:
        """Sets the limits of ``project``; ``None``: no limit of its own."""
        limits = make(
            Limits,
            sandboxes=sandboxes,
            cores=cores,
            memory_mb=memory_mb,
            creations_per_s=creations_per_s,
        )
        request = QuotaCreate(request_id=_ids.new(), limits=limits, project=project)
        return (await self._change("create", request)).quota  # type: ignore[no-any-return]

    async def get(self, project: str | None = None) -> QuotaInfo:
        """``.limit`` and ``.used`` of a project."""
        reply = await self._read("get", IamQuery(project=self._project(project)))
        return present(reply.quota, "quota")  # type: ignore[no-any-return]


class Policies(Manager):
    """``client.policies``: named policies of a project, seen by all below it. A create's
    ``policy`` may be a name (``name[:version]``)."""

    _entity = "policy"

    async def create(
        self, name: str, document: Mapping[str, Any], *, project: str | None = None
    ) -> PolicyInfo:
        """Keeps ``document`` as the next version of ``name``; the newest one's again is no
        new version."""
        request = make(PolicyCreate, request_id=_ids.new(), name=name, document=dict(document))
        reply = await self._change("create", request, project=project)
        return present(reply.policy, "policy")  # type: ignore[no-any-return]

    async def get(self, name: str, *, project: str | None = None) -> PolicyInfo:
        """``name[:version]`` with its ``.document``. Raises ``NotFound``."""
        reply = await self._read("get", make(IamQuery, policy=name), project=project)
        return present(reply.policy, "policy")  # type: ignore[no-any-return]

    async def list(self, *, project: str | None = None) -> Sequence[PolicyInfo]:
        """The newest version of every name, without documents."""
        return (await self._read("list", IamQuery(), project=project)).policies or []

    async def delete(
        self, name: str, *, version: int | None = None, project: str | None = None
    ) -> None:
        """Forgets one version, or all. Sandboxes keep what they were started with."""
        request = make(PolicyDelete, request_id=_ids.new(), name=name, version=version)
        await self._change("delete", request, project=project)


async def document_of(core: Core, project: str, policy: Mapping[str, Any] | str) -> dict[str, Any]:
    """A policy document, looked up where it is a name. Raises ``NotFound``."""
    if not isinstance(policy, str):
        return dict(policy)
    return (await Policies(core).get(policy, project=project)).document


class Nodes(Manager):
    """``client.nodes``: the fleet as its probes found it."""

    _entity = "node"

    async def list(self) -> Sequence[NodeInfo]:
        """All nodes, with state, capacity, use and backends."""
        return (await self._read("list", IamQuery(), NodeList)).nodes  # type: ignore[no-any-return]

    async def get(self, id: str) -> NodeInfo:
        """One node. Raises ``NotFound``."""
        found = next((n for n in await self.list() if n.id == id), None)
        if found is None:
            raise NotFound(f"there is no node {id!r}", field="id")
        return found

    async def cordon(self, id: str) -> None:
        """No new sandboxes there."""
        await self._command("cordon", id)

    async def uncordon(self, id: str) -> None:
        """New sandboxes again."""
        await self._command("uncordon", id)

    async def drain(self, id: str) -> None:
        """No new sandboxes; those there end."""
        await self._command("drain", id)

    async def _command(self, verb: str, id: str) -> None:
        request = make(NodeCommand, request_id=_ids.new(), node=id, verb=verb)
        await self._change(verb, request, type_=Ok)
