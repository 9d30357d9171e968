"""Snapshots of a sandbox's disk: packed layers, restored sandboxes, branches.

Owns: the calls and what they return. Does not own: creating (:mod:`libdsec._create`), the
names of images (:mod:`libdsec.images`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from libdsec import _ids
from libdsec._core import Core
from libdsec._create import CREATE_S, Made, create
from libdsec._held import Held
from libdsec._wire import (
    MAX_BATCH,
    ImageInfo,
    ImageReply,
    LayerProvenance,
    Removed,
    SandboxSpec,
    SnapshotCreate,
)
from libdsec.args import Seconds, seconds
from libdsec.errors import InternalError, InvalidRequest, NotFound

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

SNAPSHOT_S = 600.0
"""Longest silence of a snapshot that is being taken."""
SNAPSHOT_RESEND_S = 60.0


@dataclass(frozen=True, slots=True)
class Layer:
    """What a sandbox changed, as a layer: ``digest``, ``size_bytes``; ``parents`` are the
    digests below it. ``name`` is an image of all of them, to be used as
    ``container_image``. ``removed``: what the scrub left out, the first of
    ``removed_count``. ``frozen_s``: how long the sandbox stood still."""

    name: str
    digest: str
    size_bytes: int
    parents: Sequence[str]
    removed: Sequence[Removed]
    removed_count: int
    frozen_s: float
    image: ImageInfo

    def __repr__(self) -> str:
        return f"Layer({self.name!r}, {self.size_bytes} bytes, removed={self.removed_count})"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A sandbox's disk at one moment, to be restored. ``name`` is its image, ``digest``
    and ``size_bytes`` are of the layer that it added, ``sandbox`` is the uid it is of."""

    name: str
    digest: str
    size_bytes: int
    sandbox: str
    frozen_s: float
    image: ImageInfo

    def __repr__(self) -> str:
        return f"Snapshot({self.name!r}, of {self.sandbox}, {self.size_bytes} bytes)"


class HasSnapshots(Held):
    """The calls of a sandbox about its disk as a whole. None of them resumes it."""

    async def pack_diff(
        self,
        name: str,
        *,
        scrub: bool = True,
        remove: Sequence[str] = (),
        timeout: Seconds = SNAPSHOT_S,
        request_id: str | None = None,
    ) -> Layer:
        """Packs what it changed as the image ``name``, over its own layers, while it goes
        on. ``scrub`` leaves out what use leaves behind: shell histories, credentials,
        caches, logs, temporary files, git objects that HEAD does not reach; ``remove``
        names more: absolute paths with ``*`` and ``**``. Needs the grants
        ``sandbox.snapshot`` and ``image.create``. The same ``request_id`` is the same
        layer."""
        image = await self._snapshot(
            timeout, request_id, name=name, scrub=scrub, remove=list(remove)
        )
        made = _provenance(image)
        return Layer(
            image.name, made.layer, image.layers[-1].size_bytes, tuple(made.parents),
            tuple(made.removed), made.removed_count, made.frozen_s, image,
        )  # fmt: skip

    async def snapshot(
        self,
        memory: bool = False,
        *,
        timeout: Seconds = SNAPSHOT_S,
        request_id: str | None = None,
    ) -> Snapshot:
        """Its disk as it is now, complete, to be given to :meth:`DSecClient.restore`.
        ``memory``: with what runs in it (``Unsupported`` for containers). Needs the grant
        ``sandbox.snapshot``."""
        image = await self._snapshot(timeout, request_id, memory=memory)
        made = _provenance(image)
        return Snapshot(
            image.name, made.layer, image.layers[-1].size_bytes, made.sandbox, made.frozen_s, image
        )

    async def _snapshot(
        self, timeout: Seconds, request_id: str | None, **facts: Any
    ) -> ImageInfo:
        limit = seconds(timeout, "timeout")
        if limit is None or limit <= 0:
            raise InvalidRequest("timeout: more than 0 s", field="timeout")
        try:
            request = msgspec.convert(
                {"request_id": request_id or _ids.new(), "uid": self.uid, **facts}, SnapshotCreate
            )
        except msgspec.ValidationError as exc:
            text, _, path = str(exc).partition(" - at `")
            field = path.rstrip("`").removeprefix("$.").partition("[")[0] or None
            raise InvalidRequest(text, field=field) from exc
        subject = self._core.calls.req_subject(self.project, "sandbox", "snapshot")
        reply = await self._core.calls.change(
            subject, request, ImageReply, timeout_s=limit, resend_s=SNAPSHOT_RESEND_S,
            done=lambda found: found.image is not None,
        )  # fmt: skip
        if reply.image is None:
            raise InternalError("the answer has no image")
        return reply.image

    async def fork(
        self, n: int, *, timeout: Seconds = CREATE_S, request_id: str | None = None
    ) -> list[Sandbox]:
        """``n`` branches of it, on its node: each has its disk as it is now, shares all of
        that, and writes apart from the others; no process is carried over. Its limits,
        job and labels are theirs, and each counts in quotas as it does. All or none: where
        one cannot run the others are stopped and its error is raised. Needs the grant
        ``sandbox.fork``. The same ``request_id`` is the same branches."""
        if self._spec is None or self._spec.get("policy_name"):  # what its name meant then
            found = await self._core.lookup(self.uid, self.project)
            if found is None or found.spec is None:
                raise NotFound(f"there is no sandbox {self.uid}")
            self._spec = msgspec.to_builtins(found.spec)
        kept = self.uid not in self._core.owned
        return await branches(
            self._core, branch_spec(self._spec, self.uid), n, timeout=timeout,
            request_id=request_id, kept=kept, verb="fork", project=self.project,
        )  # fmt: skip


def _provenance(image: ImageInfo) -> LayerProvenance:
    if image.provenance is None or not image.layers:
        raise NotFound(f"image {image.name} was not packed from a sandbox", field="snapshot")
    return image.provenance


async def branches(
    core: Core,
    spec: Mapping[str, Any],
    n: int,
    *,
    timeout: Seconds,
    request_id: str | None,
    kept: bool,
    verb: str = "create",
    project: str | None = None,
) -> list[Sandbox]:
    """``n`` sandboxes of one spec, all or none."""
    if isinstance(n, bool) or not isinstance(n, int) or not 0 < n <= MAX_BATCH:
        raise InvalidRequest(f"n is a number from 1 to {MAX_BATCH}", field="n")
    limit = seconds(timeout, "timeout")
    if limit is None or not 0 < limit <= 86_400:
        raise InvalidRequest("timeout: more than 0 and at most 86400 s", field="timeout")
    project = project or core.config.project
    made = await create(
        core, [dict(spec)], count=n, timeout_s=limit, request_id=request_id or _ids.new(),
        wait=True, kept=[kept] * n, verb=verb, project=project,
    )  # fmt: skip
    failed = next((one.error for one in made if one.error is not None), None)
    if failed is not None:
        good = [one.uid for one in made if one.error is None]
        if good:
            await core.operate("stop", project, good, cause="cancelled")
        raise failed
    return [_sandbox(core, one, spec, project) for one in made]


def _sandbox(core: Core, made: Made, spec: Mapping[str, Any], project: str) -> Sandbox:
    from libdsec.sandbox import Sandbox

    return Sandbox(
        core, made.uid, project=project, state=made.state, id=made.id, node=made.node,
        job=spec.get("job"), labels=spec.get("labels"), spec=spec,
    )  # fmt: skip


def branch_spec(spec: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The spec of a branch of ``source``, which was made of ``spec``. It is the same
    whoever knows ``spec`` from where, so that a request that is repeated is the same."""
    plain: dict[str, Any] = msgspec.to_builtins(msgspec.convert(spec, SandboxSpec))
    for name in ("node", "policy_name"):  # it has the document
        plain.pop(name, None)
    return plain | {"source": source}


def restored_spec(image: ImageInfo, *, job: str | None) -> dict[str, Any]:
    """The spec of a sandbox that is restored from ``image``: as its sandbox had it, in
    no job but ``job``. Raises ``NotFound`` for what was not packed from a sandbox."""
    spec = _provenance(image).spec or SandboxSpec()
    plain: dict[str, Any] = msgspec.to_builtins(spec)
    for name in ("layers", "job", "source", "node", "policy_name"):
        plain.pop(name, None)
    return plain | {"container_image": image.name} | ({"job": job} if job else {})
