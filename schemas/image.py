"""Messages of imagesvc: register, resolve, list, delete images."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Message, Token, Uid, UnixTime, Versioned, WireError
from schemas.sandbox import ImageConfig, ImageName, LayerRef, ResolvedSpec, SandboxSpec, State

Kind = Literal["base", "workspace", "toolkit", "snapshot"]
ScrubPattern = Annotated[str, Meta(min_length=2, max_length=1024, pattern=r"^/[^\x00]*$")]
"""An absolute path; ``*`` stands for anything within a name, ``**`` for any names."""


class ImageCreate(Versioned, frozen=True):
    """``req image.create``. Exactly one source: ``path`` (a directory, tar or
    ``docker save`` archive on imagesvc's machine, below its allowed roots) or
    ``docker`` (a local Docker image). ``prefix``: where a workspace or toolkit
    lands in the sandbox."""

    request_id: str
    name: ImageName
    kind: Kind = "base"
    path: Annotated[str, Meta(max_length=4096)] | None = None
    docker: Annotated[str, Meta(max_length=256)] | None = None
    prefix: Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096)] | None = None
    config: ImageConfig | None = None


class ImageDelete(Versioned, frozen=True):
    """``req image.delete``."""

    request_id: str
    name: ImageName


class SnapshotCreate(Versioned, frozen=True):
    """``req sandbox.snapshot``: what a sandbox changed becomes a layer over its own, and
    the whole an image: ``name``, or where that is missing a snapshot of a name made up
    from the request id. ``scrub``: residue of its use is left out, and what ``remove``
    names too."""

    request_id: Uid
    uid: Uid
    name: ImageName | None = None
    scrub: bool = False
    remove: Annotated[list[ScrubPattern], Meta(max_length=256)] = []
    memory: bool = False


class ImageCommand(Versioned, frozen=True):
    """auth → imagesvc, ``dsec.cmd.v1.image.<create|delete|snapshot>.<key>``. ``projects``:
    the project and its ancestors, nearest first."""

    project: str
    principal: str
    create: ImageCreate | None = None
    delete: ImageDelete | None = None
    snapshot: SnapshotCreate | None = None
    projects: list[str] = []
    reply_to: str | None = None
    trace: str | None = None


class ImageChanged(Versioned, frozen=True):
    """imagesvc → schedulers, ``dsec.evt.v1.imagesvc.image.<project>``: what was
    resolved for ``name`` before is to be forgotten. Told before the request is
    answered, so that whoever got the answer gets the new image."""

    project: str
    name: str


class Removed(Message, frozen=True):
    """What a scrub left out: the path, the rule that says so, bytes of contents below it."""

    path: str
    rule: str
    bytes: int = 0


class LayerProvenance(Message, frozen=True):
    """Where a packed layer comes from. ``parents``: the digests it lies upon; ``spec``:
    of its sandbox; ``frozen_s``: how long that stood still; ``removed``: the first of
    ``removed_count`` things that were scrubbed."""

    sandbox: Uid
    principal: str
    node: str
    at: UnixTime
    layer: str
    parents: list[str] = []
    job: str | None = None
    spec: SandboxSpec | None = None
    frozen_s: float = 0.0
    scrubbed: bool = False
    removed: list[Removed] = []
    removed_count: int = 0


class ImageInfo(Message, frozen=True):
    """A registered image. Names are visible in their project and below it."""

    name: str
    project: str
    kind: Kind
    layers: list[LayerRef]
    config: ImageConfig
    size_bytes: int
    created_at: UnixTime
    provenance: LayerProvenance | None = None


class ImageReply(Versioned, frozen=True):
    """The answer to an image request. While an import runs, replies with only
    ``progress`` (0…1) and ``stage`` come first."""

    request_id: str | None = None
    image: ImageInfo | None = None
    images: list[ImageInfo] | None = None
    progress: float | None = None
    stage: str = ""
    error: WireError | None = None


class ImageQuery(Versioned, frozen=True):
    """``get image.list`` and ``image.get`` (with ``name``). ``projects`` is filled
    in by auth: the subject's project and its ancestors."""

    name: str | None = None
    kind: Kind | None = None
    projects: list[str] = []


class ResolveItem(Message, frozen=True):
    """One environment to resolve: names bottom to top, as ``projects`` (nearest
    first) see them."""

    names: list[str]
    projects: list[str]


class ResolveRequest(Versioned, frozen=True):
    """scheduler → imagesvc, ``dsec.rpc.v1.imagesvc.resolve``."""

    items: list[ResolveItem]


class Resolved(Message, frozen=True):
    """Layers and merged defaults, or why not."""

    layers: list[LayerRef] = []
    config: ImageConfig = ImageConfig()
    error: WireError | None = None


class ResolveReply(Versioned, frozen=True):
    """One answer per item, in order."""

    items: list[Resolved]


class LayerUseQuery(Versioned, frozen=True):
    """imagesvc → scheduler, ``dsec.rpc.v1.scheduler.layers``: which of these layers do
    living sandboxes need?"""

    digests: Annotated[list[str], Meta(max_length=1000)]


class LayerUse(Versioned, frozen=True):
    """Those of the digests asked about that a sandbox was started from which lives, or
    may live on a node that was lost not long ago."""

    used: list[str]


class OriginQuery(Versioned, frozen=True):
    """imagesvc → scheduler, ``dsec.rpc.v1.scheduler.origin``: where does this sandbox of
    this project run, and what was it started from?"""

    project: Token
    uid: Uid


class Origin(Versioned, frozen=True):
    """A sandbox as a snapshot needs it."""

    uid: Uid
    node: Token
    state: State
    resolved: ResolvedSpec
    job: str | None = None
