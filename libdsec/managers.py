"""Managers: images, projects, keys, grants, quotas, nodes.

Owns: calls of one shape (``create get list delete``). Does not own: what they mean;
the services do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from libdsec import _ids
from libdsec._core import Core
from libdsec._wire import (
    GrantCreate,
    GrantDelete,
    IamQuery,
    IamReply,
    ImageCreate,
    ImageDelete,
    ImageInfo,
    ImageQuery,
    ImageReply,
    KeyCreate,
    KeyDelete,
    KeyInfo,
    Limits,
    NodeCommand,
    NodeInfo,
    NodeList,
    Ok,
    ProjectCreate,
    ProjectDelete,
    ProjectInfo,
    QuotaCreate,
    QuotaInfo,
)
from libdsec.args import Seconds, seconds
from libdsec.errors import InternalError, InvalidRequest, NotFound

IMPORT_S = 600.0
"""Longest silence of a running import (its progress starts the time anew)."""
IMPORT_RESEND_S = 60.0

OnProgress = Callable[[float, str], None]
"""Called with a share 0…1 and the name of the stage."""


class Manager:
    """Requests and reads of one entity."""

    _entity = ""

    def __init__(self, core: Core) -> None:
        self._core = core

    def __repr__(self) -> str:
        return f"{type(self).__name__}(project={self._core.config.project!r})"

    def _project(self, project: str | None) -> str:
        return project or self._core.config.project

    async def _change(
        self, verb: str, message: Any, *, project: str | None = None, **options: Any
    ) -> Any:
        subject = self._core.calls.req_subject(self._project(project), self._entity, verb)
        type_ = options.pop("type_", IamReply)
        return await self._core.calls.change(subject, message, type_, **options)

    async def _read(
        self, verb: str, message: Any, type_: Any = IamReply, *, project: str | None = None
    ) -> Any:
        subject = self._core.calls.get_subject(self._project(project), self._entity, verb)
        return await self._core.calls.read(subject, message, type_)


def make(type_: Any, **facts: Any) -> Any:
    """A message from arguments. Raises ``InvalidRequest`` naming the argument."""
    given = {k: v for k, v in facts.items() if v is not None}
    try:
        return msgspec.convert(given, type_)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `")
        name = path.rstrip("`").removeprefix("$.") or None
        raise InvalidRequest(text, field=name) from exc


def _present(value: Any, what: str) -> Any:
    if value is None:
        raise InternalError(f"the answer has no {what}")
    return value


class Images(Manager):
    """``client.images``. A name is ``name[:tag]``."""

    _entity = "image"

    async def create(
        self,
        name: str,
        *,
        path: str | None = None,
        docker: str | None = None,
        kind: Literal["base", "workspace", "toolkit"] = "base",
        prefix: str | None = None,
        config: Mapping[str, Any] | None = None,
        on_progress: OnProgress | None = None,
    ) -> ImageInfo:
        """Registers an image from ``path`` (a directory, tar or ``docker save`` archive
        on the image service's machine) or from a local ``docker`` image. ``prefix``:
        where a workspace or toolkit lands."""
        if (path is None) == (docker is None):
            raise InvalidRequest("name one of path and docker", field="path")
        request = make(
            ImageCreate,
            request_id=_ids.new(),
            name=name,
            kind=kind,
            path=path,
            docker=docker,
            prefix=prefix,
            config=config,
        )

        def report(reply: ImageReply) -> None:
            if on_progress is not None and reply.progress is not None:
                on_progress(reply.progress, reply.stage)

        reply = await self._change(
            "create",
            request,
            type_=ImageReply,
            timeout_s=IMPORT_S,
            resend_s=IMPORT_RESEND_S,
            done=lambda r: r.image is not None,
            progress=report,
        )
        return _present(reply.image, "image")  # type: ignore[no-any-return]

    async def get(self, name: str) -> ImageInfo:
        """One image. Raises ``NotFound``."""
        reply = await self._read("get", make(ImageQuery, name=name), ImageReply)
        image = reply.image or next(iter(reply.images or []), None)
        if image is None:
            raise NotFound(f"there is no image {name!r}", field="name")
        return image  # type: ignore[no-any-return]

    async def list(self, *, kind: str | None = None) -> Sequence[ImageInfo]:
        """Images of the project and those above it."""
        reply = await self._read("list", make(ImageQuery, kind=kind), ImageReply)
        return reply.images or []

    async def delete(self, name: str) -> None:
        """Removes the name; layers go when nothing uses them."""
        request = make(ImageDelete, request_id=_ids.new(), name=name)
        await self._change("delete", request, type_=ImageReply)


class Projects(Manager):
    """``client.projects``. A child project is bounded by all above it."""

    _entity = "project"

    async def create(
        self, name: str, *, parent: str | None = None, id: str | None = None
    ) -> ProjectInfo:
        """Makes a child of ``parent`` (default: the client's project)."""
        request = make(ProjectCreate, request_id=_ids.new(), name=name, id=id)
        reply = await self._change("create", request, project=parent)
        return _present(reply.project, "project")  # type: ignore[no-any-return]

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
        return _present(reply.key, "key")  # type: ignore[no-any-return]

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
        return _present(reply.quota, "quota")  # type: ignore[no-any-return]


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
