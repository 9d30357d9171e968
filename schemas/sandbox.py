"""Messages of a sandbox's life: create, pause, resume, stop, observations, events.

Field names are those of the SDK's run arguments, so that an error's ``field`` is
the name the caller wrote. Sizes in MiB (``*_mb``), CPU in cores, times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from schemas.base import Message, Seconds, Token, Uid, UnixTime, Versioned, WireError
from schemas.iam import PolicyReference
from schemas.secret import SecretBinding, SecretName

Backend = Literal["container", "microvm", "vm", "fncall", "fake"]
State = Literal[
    "requested", "placed", "starting", "running", "pausing", "paused", "resuming",
    "stopping", "stopped", "failed", "rejected", "lost",
]  # fmt: skip

MAX_BATCH = 32_768
"""Sandboxes in one create request."""

ImageName = Annotated[str, Meta(min_length=1, max_length=256)]
Cores = Annotated[float, Meta(gt=0, le=1024)]
MemoryMb = Annotated[int, Meta(ge=16, le=4_194_304)]
DiskMb = Annotated[int, Meta(ge=1, le=16_777_216)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Labels = dict[
    Annotated[str, Meta(min_length=1, max_length=63)], Annotated[str, Meta(max_length=255)]
]


Rules = Annotated[
    list[Annotated[str, Meta(min_length=1, max_length=255)]], Meta(max_length=64)
]


class Tightening(Message, frozen=True):
    """What a policy is made stricter by, and stays so. ``network``: targets of network rules
    that are denied, however specific what allows them (``*``: no way out at all). ``deny``:
    calls, as in a policy's ``processes.deny``."""

    network: Rules = []
    deny: Rules = []


class SandboxSpec(Message, frozen=True):
    """What a sandbox is to be. ``container_image`` or ``layers`` (bottom to top).
    ``routes``: at which port of its loopback interface it reaches an address that the
    node's operator gave this name, for each a grant ``route.<name>``. ``secrets``: what the
    way out puts into its requests, by name, with the grant ``secret.use``.
    ``policy_name``: a named policy of the project or one above it, instead of ``policy``, which
    auth fills in. ``tighten`` lies over the policy, whatever that becomes; the edge notes
    there what came while the sandbox ran.
    ``scoring_grace_s``: how long it stands for a verifier when a time limit has ended its
    work. ``offline``: nothing leaves it, whatever the rules say.
    Of a ``fork`` only: ``source``, the sandbox that it is a branch of, and
    ``node``, where that is: the scheduler fills it in."""

    backend: Backend = "container"
    container_image: ImageName | None = None
    layers: Annotated[list[ImageName], Meta(max_length=64)] = []
    cpu_cores_limit: Cores | None = None
    cpu_cores_request: Cores | None = None
    memory_limit_mb: MemoryMb | None = None
    memory_request_mb: MemoryMb | None = None
    disk_limit_mb: DiskMb | None = None
    pids_limit: Annotated[int, Meta(ge=8, le=4_194_304)] | None = None
    env: dict[Annotated[str, Meta(pattern=r"^[^=\x00]+$")], str] = {}
    workdir: Annotated[str, Meta(pattern=r"^/[^\x00]*$", max_length=4096)] | None = None
    init_user: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    ttl_running_stop: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    deadline_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    on_timeout: Literal["stop", "pause"] = "stop"
    scoring_grace_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    network_rules: dict[Annotated[str, Meta(min_length=1, max_length=255)], bool] = {}
    policy: dict[str, Any] | None = None
    policy_name: PolicyReference | None = None
    require: list[str] = []
    qos: Literal["best_effort", "latency_sensitive"] = "best_effort"
    labels: Labels = {}
    job: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    options: dict[str, Any] = {}
    routes: dict[Token, Port] = {}
    offline: bool = False
    secrets: dict[SecretName, SecretBinding] = {}
    tighten: Tightening | None = None
    source: Uid | None = None
    node: Token | None = None


class CreateRequest(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.sandbox.<create|fork>[.<principal>]``.

    ``specs`` × ``count`` sandboxes (``count`` > 1 only with one spec). Each spec is
    judged alone: bad ones get their own error, the others run. ``request_id`` is
    the idempotency key and the uid of the first sandbox; sandbox *i* has the uid
    ``ids.item_uid(request_id, i)``. ``timeout_s`` bounds the wait for readiness. A fork's
    one spec names its ``source``: the environment is that sandbox's, whatever else it says.
    """

    request_id: Uid
    specs: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=MAX_BATCH)]
    count: Annotated[int, Meta(ge=1, le=MAX_BATCH)] = 1
    timeout_s: Annotated[float, Meta(gt=0, le=86_400)] = 120.0


class ItemResult(Message, frozen=True):
    """One sandbox of a request. ``id`` (``<node>-<uid>``) once it is placed."""

    index: int
    uid: Uid
    state: State
    id: str | None = None
    node: str | None = None
    error: WireError | None = None


class CreateReply(Versioned, frozen=True):
    """→ the client's inbox; as many as it takes until every item has settled."""

    request_id: Uid
    total: int
    results: list[ItemResult]


class CreateItem(Message, frozen=True, array_like=True):
    """One sandbox of a :class:`CreateCommand`. ``spec`` is an index into its specs;
    ``refused`` is set where auth said no (then nothing is charged)."""

    uid: Uid
    index: int
    spec: int = -1
    refused: WireError | None = None


class CreateCommand(Message, frozen=True):
    """One client request, admitted. ``expires_at``: give up starting after it.
    ``projects``: the project and its ancestors, nearest first, whose images it sees
    (empty: only its own). ``asked_at``: when the bus stored the request; a job that was
    stopped after it starts nothing of it."""

    project: Token
    principal: str
    request_id: Uid
    total: int
    specs: list[SandboxSpec]
    items: list[CreateItem]
    expires_at: UnixTime
    reply_to: str | None = None
    trace: str | None = None
    projects: list[str] = []
    asked_at: UnixTime = 0.0


class SandboxCreate(Versioned, frozen=True):
    """auth → scheduler, ``dsec.cmd.v1.sandbox.create.<key>``: a flush of requests."""

    commands: list[CreateCommand]


Verb = Literal["stop", "pause", "resume", "set_timeout", "tighten"]


class SandboxOpRequest(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.sandbox.<stop|pause|resume|set_timeout|tighten>``.

    Names sandboxes by ``uids`` or all of a ``job`` or all that carry ``labels``.
    ``ttl_running_stop`` and ``deadline_s`` belong to set_timeout, ``tighten`` to tighten.
    """

    request_id: Uid
    uids: Annotated[list[Uid], Meta(max_length=MAX_BATCH)] = []
    job: str | None = None
    labels: Labels = {}
    grace_s: Seconds = 0.0
    cause: Annotated[str, Meta(max_length=64)] | None = None
    ttl_running_stop: Seconds | None = None
    deadline_s: Seconds | None = None
    tighten: Tightening | None = None


class OpCommand(Message, frozen=True):
    """A :class:`SandboxOpRequest`, admitted."""

    project: Token
    principal: str
    verb: Verb
    request: SandboxOpRequest
    reply_to: str | None = None
    trace: str | None = None
    asked_at: UnixTime = 0.0


class SandboxOp(Versioned, frozen=True):
    """auth → scheduler, ``dsec.cmd.v1.sandbox.op.<key>``."""

    commands: list[OpCommand]


class OpReply(Versioned, frozen=True):
    """→ the client's inbox when every named sandbox has settled (or its error). Where a
    node is silent, the item says ``unavailable`` and the state it is in (``stopping``):
    the operation stands, and is carried out when the node is back. Many results come
    in several messages; the final one is the ``last``."""

    request_id: Uid
    results: list[ItemResult]
    last: bool = True


class LayerRef(Message, frozen=True):
    """A layer in the store."""

    digest: str
    size_bytes: int = 0


class ImageConfig(Message, frozen=True):
    """Defaults that an image brings."""

    env: dict[str, str] = {}
    workdir: str | None = None
    user: str | None = None
    entrypoint: list[str] = []
    cmd: list[str] = []
    volumes: list[str] = []
    labels: dict[str, str] = {}


class ResolvedSpec(Message, frozen=True):
    """A spec with its environment resolved to layers, bottom to top. ``branch``: the id
    of the copy of its source's changes that lies above them, on the source's node."""

    spec: SandboxSpec
    layers: list[LayerRef] = []
    image: ImageConfig = ImageConfig()
    branch: Uid | None = None


class StartItem(Message, frozen=True, array_like=True):
    """One start; ``spec`` is an index into the message's specs."""

    uid: Uid
    project: Token
    generation: int
    spec: int
    expires_at: UnixTime
    principal: str = ""
    trace: str | None = None


class EdgeStart(Versioned, frozen=True):
    """scheduler → edge, ``dsec.cmd.v1.edge.start.<node>``."""

    specs: list[ResolvedSpec]
    starts: list[StartItem]


class EdgeOpItem(Message, frozen=True):
    """One operation on one sandbox at a known generation. ``asked_at``: when the bus
    stored the client's request; of two ``set_timeout`` the one asked later counts."""

    uid: Uid
    project: Token
    generation: int
    cause: str | None = None
    grace_s: float = 0.0
    ttl_running_stop: float | None = None
    deadline_s: float | None = None
    trace: str | None = None
    tighten: Tightening | None = None
    asked_at: float = 0.0


class EdgeOp(Versioned, frozen=True):
    """scheduler → edge, ``dsec.cmd.v1.edge.<stop|pause|resume|set_timeout|tighten>.<node>``."""

    items: list[EdgeOpItem]


Observed = Literal[
    "starting", "running", "refused", "failed", "stopped", "paused", "resumed", "unknown"
]


class Observation(Message, frozen=True):
    """What an edge saw of one sandbox. ``refused``: admission said no, try another
    node; ``unknown``: the edge was asked about a sandbox it does not have."""

    uid: Uid
    generation: int
    observed: Observed
    at: UnixTime
    cause: str | None = None
    message: str = ""
    error: WireError | None = None
    enforcement: dict[str, str] = {}


class EdgeObservations(Versioned, frozen=True):
    """edge → scheduler, ``dsec.evt.v1.edge.sandbox.<node>``."""

    node: Token
    epoch: str
    observations: list[Observation]


class SandboxEvent(Versioned, frozen=True):
    """scheduler → everyone, ``dsec.evt.v1.sandbox.<project>.<state>.<uid>``."""

    uid: Uid
    project: Token
    state: State
    generation: int
    at: UnixTime
    id: str | None = None
    node: str | None = None
    backend: str = "container"
    cause: str | None = None
    is_infra: bool = False
    message: str = ""
    job: str | None = None
    labels: Labels = {}
    request_id: str | None = None
    index: int = 0
    error: WireError | None = None


class SandboxInfo(Message, frozen=True):
    """A sandbox as the scheduler knows it. ``time_up``: the time limit that ended or paused
    it."""

    uid: Uid
    project: Token
    state: State
    generation: int
    backend: str
    created_at: UnixTime
    changed_at: UnixTime
    id: str | None = None
    node: str | None = None
    request_id: str | None = None
    index: int = 0
    principal: str = ""
    cause: str | None = None
    is_infra: bool = False
    message: str = ""
    error: WireError | None = None
    job: str | None = None
    labels: Labels = {}
    spec: SandboxSpec | None = None
    enforcement: dict[str, str] = {}
    time_up: str | None = None


class SandboxQuery(Versioned, frozen=True):
    """client → auth, ``dsec.get.v1.<project>.sandbox.list`` (and ``.get`` with
    ``uids``). Pages: ``after`` is the last uid of the page before."""

    uids: Annotated[list[Uid], Meta(max_length=MAX_BATCH)] = []
    request_id: str | None = None
    job: str | None = None
    labels: Labels = {}
    states: list[State] = []
    node: str | None = None
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    project: str | None = None


class EndedQuery(Versioned, frozen=True):
    """auth → scheduler, ``dsec.rpc.v1.scheduler.ended``: which sandboxes have ended in the
    last ``since_s`` seconds? The latest ``limit`` of them."""

    since_s: Annotated[float, Meta(gt=0, le=3600)]
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 2_000


class Ended(Versioned, frozen=True):
    """Pairs of project and uid."""

    sandboxes: list[tuple[Token, Uid]]


class SandboxPage(Versioned, frozen=True):
    """Sandboxes in the order of their uids; ``next`` is set where more follow."""

    sandboxes: list[SandboxInfo]
    next: str | None = None
