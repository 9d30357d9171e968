"""Messages of imagesvc: register, resolve, list, delete images."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Message, Token, Uid, UnixTime, Versioned, WireError
from schemas.sandbox import ImageConfig, ImageName, LayerRef, ResolvedSpec, SandboxSpec, State

Kind = Literal["base", "workspace", "toolkit", "snapshot"]
Form = Literal["auto", "image", "tree", "git", "dockerfile"]
BlobId = Annotated[str, Meta(pattern=r"^[0-9a-z]{16,64}$(?!\n)")]
ScrubPattern = Annotated[str, Meta(min_length=2, max_length=1024, pattern=r"^/[^\x00]*$")]
"""An absolute path; ``*`` stands for anything within a name, ``**`` for any names."""
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
BLOB_CHUNK_BYTES = 512 * 1024
"""Of one ``blob`` message; with its encoding well under a server's 1 MiB."""
BLOB_WINDOW = 4
"""Messages of one transfer that are under way at a time."""


class Blob(Message, frozen=True):
    """Bytes handed over on ``dsec.blob.v1.<project>.<put|get>.<principal>``."""

    id: BlobId
    size_bytes: Annotated[int, Meta(ge=0)]
    sha256: Sha256


class BlobPut(Versioned, frozen=True):
    """``blob put``: bytes of an upload at ``offset``. Answered by :class:`BlobState`:
    what is there already is passed over, what leaves a gap is not taken."""

    id: BlobId
    offset: Annotated[int, Meta(ge=0)]
    data: bytes = b""


class BlobState(Versioned, frozen=True):
    """How much of an upload is there: where to go on."""

    size_bytes: int


class BlobGet(Versioned, frozen=True):
    """``blob get``: at most ``length`` bytes of an export from ``offset``."""

    id: BlobId
    offset: Annotated[int, Meta(ge=0)]
    length: Annotated[int, Meta(ge=1, le=BLOB_CHUNK_BYTES)]


class BlobPiece(Versioned, frozen=True):
    """The bytes asked for; fewer at the end."""

    data: bytes


class ImageCreate(Versioned, frozen=True):
    """``req image.create``. Exactly one source: ``path`` on imagesvc's machine, below
    its allowed roots; ``upload``, handed over before; ``docker``, an image of its
    local engine; or ``registry`` (``host/repository[:tag][@sha256:…]``).

    A path or upload is, by ``form``: ``image`` (``docker save`` archive or OCI layout,
    ``reference`` choosing one of several), ``tree`` (directory or layer tar), ``git``
    (repository or bundle, rebuilt at ``commit``), ``dockerfile`` (build context with
    the file ``dockerfile``, built up to ``target``); ``auto`` tells the first two
    apart. ``prefix``: where a workspace or toolkit lands in the sandbox."""

    request_id: str
    name: ImageName
    kind: Kind = "base"
    path: Annotated[str, Meta(max_length=4096)] | None = None
    upload: Blob | None = None
    docker: Annotated[str, Meta(max_length=256)] | None = None
    registry: Annotated[str, Meta(max_length=512)] | None = None
    form: Form = "auto"
    reference: Annotated[str, Meta(max_length=512)] | None = None
    commit: Annotated[str, Meta(max_length=200)] | None = None
    dockerfile: Annotated[str, Meta(max_length=512)] | None = None
    target: Annotated[str, Meta(max_length=128)] | None = None
    prefix: Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096)] | None = None
    config: ImageConfig | None = None


class ImageDelete(Versioned, frozen=True):
    """``req image.delete``."""

    request_id: str
    name: ImageName


class ImageTag(Versioned, frozen=True):
    """``req image.tag``: ``target`` comes to mean what ``name`` means now, at once and
    whole; sandboxes that run keep what they were started from."""

    request_id: str
    name: ImageName
    target: ImageName


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
    """auth → imagesvc, ``dsec.cmd.v1.image.<create|delete|tag|snapshot>.<key>``. ``projects``:
    the project and its ancestors, nearest first."""

    project: str
    principal: str
    create: ImageCreate | None = None
    delete: ImageDelete | None = None
    tag: ImageTag | None = None
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
    export: Blob | None = None
    progress: float | None = None
    stage: str = ""
    error: WireError | None = None


class ImageQuery(Versioned, frozen=True):
    """``get image.list`` and ``image.get`` (with ``name``). ``projects`` is filled
    in by auth: the subject's project and its ancestors."""

    name: str | None = None
    kind: Kind | None = None
    projects: list[str] = []


class ImageExport(Versioned, frozen=True):
    """``get image.export``: one environment, ``names`` bottom to top, as an OCI archive.
    Asked again until the answer has ``export``: before, it has ``progress``."""

    names: Annotated[list[str], Meta(min_length=1, max_length=64)]
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
