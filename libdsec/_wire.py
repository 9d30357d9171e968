"""Wire types, constants and subjects of dsec.

Generated from schemas/ by `python -m schemas.export`: do not edit.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

VERSION = 1

HEADER_REPLY = "Dsec-Reply"
"""Where the answer to a stored request goes: a subject of the client's own inbox."""

HEADER_TRACE = "traceparent"
"""W3C trace context."""

HEADER_FRAME = "Dsec-Frame"
"""Kind of a frame of an operation's stream, see :mod:`schemas.exec`."""

HEADER_OP = "Dsec-Op"
"""Operation id of a frame from client to edge."""

Uid = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-z]{26}$(?!\n)", description="ULID, lower case")]

Token = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$(?!\n)",
        description="One token of a subject: lower case letters, digits, inner hyphens",
    ),
]

UnixTime = Annotated[float, msgspec.Meta(description="Seconds since the epoch")]

Seconds = Annotated[float, msgspec.Meta(ge=0, le=31_536_000)]

class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every wire type. Unknown fields are ignored, so that a newer sender
    may add optional ones."""

class Versioned(Message, frozen=True, kw_only=True):
    """A message that stands alone on the bus. ``v`` is its version."""

    v: int = VERSION

class WireError(Message, frozen=True):
    """An error as it travels. ``code`` is one of the closed set."""

    code: str
    message: str
    field: str | None = None
    retryable: bool = False
    cause: str | None = None
    is_infra: bool = False
    retry_after_s: float | None = None
    details: dict[str, Any] = {}

class ErrorReply(Versioned, frozen=True):
    """The answer to a request that was refused as a whole."""

    error: WireError
    request_id: str | None = None

class Ok(Versioned, frozen=True):
    """An answer that says only: done."""

M = TypeVar("M")

_encoder = msgspec.json.Encoder()

def encode(message: Any) -> bytes:
    """JSON bytes of a message."""
    return _encoder.encode(message)

KEY_CHARS_MAX = 64
"""Of a map's key in the name of a field."""

class BadMessage(ValueError):
    """A body that is not the message it should be. ``field`` is a dotted path,
    ``version`` the one found when it is not ours."""

    def __init__(
        self, message: str, *, field: str | None = None, version: int | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.version = version

class _VersionOnly(msgspec.Struct):
    v: int = VERSION

_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}

def decode(data: bytes, type_: type[M]) -> M:
    """The message in ``data``. Raises :class:`BadMessage` naming the field."""
    decoder = _decoders.get(type_)
    if decoder is None:
        decoder = _decoders[type_] = msgspec.json.Decoder(type_)
    try:
        message = decoder.decode(data)
    except msgspec.DecodeError as exc:
        raise _bad(data, exc, type_) from exc
    except RecursionError as exc:
        raise BadMessage("the body is nested too deeply") from exc
    if getattr(message, "v", VERSION) != VERSION:
        raise _version(message.v)
    return message  # type: ignore[no-any-return]

def _version(found: int) -> BadMessage:
    text = f"message version {found} is not supported, this side speaks {VERSION}"
    return BadMessage(text, field="v", version=found)

def misfit(exc: msgspec.ValidationError, type_: Any, given: Any) -> tuple[str, str | None]:
    """What of ``given`` does not fit ``type_``, and where: a dotted path, in which an entry
    of a map has its key."""
    text, _, path = str(exc).partition(" - at `")
    by_key = path.startswith("key` in `")
    path = path.removeprefix("key` in `").rstrip("`").removeprefix("$").removeprefix(".")
    name, within, rest = path.partition("[...]")
    named = isinstance(given, dict) and isinstance(type_, type)  # a struct, not a union or list
    entries = given.get(name) if named else None
    if isinstance(entries, dict) and (within or by_key):
        path = f"{name}.{_odd(entries, get_type_hints(type_, include_extras=True)[name])}{rest}"
    return text, path.replace("[...]", "").removeprefix(".") or None

def _odd(entries: dict[Any, Any], hint: Any) -> str:
    """The key of the first entry that does not fit."""
    for key, value in entries.items():
        try:
            msgspec.convert({key: value}, hint)
        except msgspec.ValidationError:
            return str(key)[:KEY_CHARS_MAX]
    return ""

def _bad(data: bytes, exc: msgspec.DecodeError, type_: Any) -> BadMessage:
    try:  # a future version explains a failing body better than its fields do
        found = msgspec.json.decode(data, type=_VersionOnly).v
    except (msgspec.DecodeError, RecursionError):
        found = VERSION
    if found != VERSION:
        return _version(found)
    text = str(exc)
    if not isinstance(exc, msgspec.ValidationError):
        return BadMessage(f"the body is not JSON: {text}")
    try:
        given = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        given = None
    message, path = misfit(exc, type_, given)
    parts = [path]
    if message.startswith("Object "):  # "missing required field `x`"
        parts.append(message.split("`")[1])
    name = ".".join(part for part in parts if part) or None
    return BadMessage(message, field=name)

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

class SandboxPage(Versioned, frozen=True):
    """Sandboxes in the order of their uids; ``next`` is set where more follow."""

    sandboxes: list[SandboxInfo]
    next: str | None = None

HEADER_OFFSET = "Dsec-Offset"
"""On ``o`` and ``e`` frames: the count of output bytes before this frame. What the client
has already is to be skipped. On ``x``: the count of all output bytes in frames. On ``i``
and ``f`` frames: the count of input bytes before; the edge skips what it has, and keeps
silent over a hole until the client attaches again."""

HEADER_AGAIN = "Dsec-Again"
"""On a request that is sent again, whether or not anything was heard of it: the operation may
have been begun, and ended, so long ago that the journal alone knows it."""

HEADER_HAVE = "Dsec-Have"
"""On one of which something was heard: decimal counts of the bytes of stdout and of stderr
that the client has, with a space between."""

HEADER_LEASE = "Dsec-Lease"
"""On a request of a verifier: the lease it is made under."""

HEADER_SOURCE = "Dsec-Source"
"""On ``o`` frames of a read: which file this is, in which state. On a request that is sent
again: what the client was told."""

CHUNK_BYTES = 256 * 1024
"""Largest body of an ``o``, ``e`` or ``i`` frame."""

WINDOW_BYTES = 4 * 1024 * 1024
"""Unacknowledged bytes per direction of one operation."""

INLINE_BYTES = 64 * 1024
"""Outputs up to this size come inside the final reply, without frames."""

LEASE_MAX_S = 600.0
"""Longest time between two renewals of a verifier's lease."""

KEEPALIVE_S = 5.0
"""Longest silence of an operation that lives."""

CONNECT_WINDOW_BYTES = 512 * 1024
"""As WINDOW_BYTES, of a connection."""

OpId = Annotated[str, Meta(pattern=r"^[0-9a-z]{26}$(?!\n)", description="ULID, lower case")]

Path = Annotated[str, Meta(min_length=1, max_length=4096, pattern=r"^[^\x00]+$")]

Cells = Annotated[int, Meta(ge=1, le=65_535)]

Lane = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[^\x00-\x1f]+$(?!\n)")]
"""A thread of a script whose operations are counted."""

Step = Annotated[int, Meta(ge=1, le=1 << 53)]
"""The number of an operation in its lane."""

UserName = Annotated[str, Meta(min_length=1, max_length=64)]

class ExecRequest(Versioned, frozen=True):
    """verb ``exec``. Exactly one of ``argv``, ``shell``. A request with an ``op_id``
    seen before re-attaches to that command or repeats its result: it never runs
    twice. ``stream``: output comes in frames as it is made, else in the reply as
    far as it fits ``INLINE_BYTES``; with ``late`` too, as long as it is no more than
    ``LATE_BYTES``, because nobody looks at it before the end. ``stdin_data`` is the whole
    input; ``stdin`` announces input frames. ``timeout_s`` (of a session: since its turn)
    and ``idle_timeout_s`` (without output) end it with its tree. ``pty`` (rows, columns)
    puts it on a terminal, with ``stream``; its output is ``stdout`` alone. ``attach``: no
    command, but the frames and the reply of the operation ``op_id`` of the same
    principal, from the output ``offset`` on (bytes of both streams) as far as it is
    retained. ``lane`` and ``step``: its place in a script, for the trajectory log."""

    op_id: OpId
    argv: Annotated[list[str], Meta(min_length=1, max_length=4096)] | None = None
    shell: str | None = None
    session: Annotated[str, Meta(min_length=1, max_length=64)] | None = None
    cwd: Path | None = None
    env: dict[Annotated[str, Meta(pattern=r"^[^=\x00]+$")], str] = {}
    user: UserName | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    idle_timeout_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    output_limit_bytes: Annotated[int, Meta(ge=0, le=1 << 40)] = 10 * 1024 * 1024
    merge: bool = False
    stdin: bool = False
    stdin_data: bytes | None = None
    stream: bool = False
    late: bool = False
    pty: tuple[Cells, Cells] | None = None
    attach: bool = False
    offset: Annotated[int, Meta(ge=0)] = 0
    lane: Lane | None = None
    step: Step | None = None

class WholeOutput(Message, frozen=True):
    """A stream of which a record holds head and tail alone: all of it is with the services,
    in pieces (:class:`schemas.trajectory.OutputQuery`)."""

    stream: Literal["stdout", "stderr"]
    bytes: Annotated[int, Meta(ge=0)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]

class ExecReply(Versioned, frozen=True):
    """The final frame of ``exec``. ``stdout`` and ``stderr`` hold what did not come
    in frames. ``truncated`` counts the bytes dropped (stdout, stderr). Of a session:
    ``session_fresh``, its shell was started for this command; ``session_ended``, the
    shell ended with it. In a record: ``whole``, where all of a long output is."""

    op_id: OpId
    exit_code: int | None = None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    truncated: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    seq: int = 0
    epoch: int = 0
    session_fresh: bool = False
    session_ended: bool = False
    stdout: bytes = b""
    stderr: bytes = b""
    whole: list[WholeOutput] = []
    error: WireError | None = None

def plain_name(name: str) -> tuple[str, bytes | None]:
    """A name as JSON carries it: what is no UTF-8 (lone surrogates, as Python has it)
    goes as bytes beside a text to be shown."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raw = name.encode("utf-8", "surrogateescape")
        return raw.decode("utf-8", "replace"), raw
    return name, None

def whole_name(text: str, raw: bytes | None) -> str:
    """What :func:`plain_name` was given."""
    return text if raw is None else raw.decode("utf-8", "surrogateescape")

class FileRequest(Versioned, frozen=True):
    """verbs ``file_read file_write file_stat file_list file_mkdir file_remove file_move
    file_pack file_unpack file_watch``; the fields each verb reads are named after what
    they do. Content travels in frames: ``o`` frames for a read, ``i`` frames for a write
    (``data`` instead, for content up to ``INLINE_BYTES``). ``raw_path`` and ``raw_target``
    stand for names that are no UTF-8. ``mtime_ns`` is set on the file written; ``sparse``
    makes holes of long rows of zeros.

    ``file_list``: entries in the reply, or, where they are many, as JSON lines of
    ``FileEntry`` in ``o`` frames; with ``recursive`` all below, not through links.
    ``file_pack``: ``data`` names files below ``path``, a zero byte behind each; the answer
    is a bundle; with ``length`` 0 without contents, of whatever there is by these names.
    ``file_unpack``: the input is a bundle that is laid out below ``path``, each file as a
    whole. ``file_watch``: JSON lines of ``FileEvent`` until cancelled; a frame holds whole
    lines."""

    op_id: OpId
    path: Path
    user: UserName | None = None
    offset: Annotated[int, Meta(ge=0)] = 0
    length: Annotated[int, Meta(ge=0)] | None = None
    mode: Annotated[int, Meta(ge=0, le=0o7777)] | None = None
    append: bool = False
    data: bytes | None = None
    size: Annotated[int, Meta(ge=0)] | None = None
    recursive: bool = False
    parents: bool = True
    target: Path | None = None
    raw_path: Annotated[bytes, Meta(min_length=1, max_length=4096)] | None = None
    raw_target: Annotated[bytes, Meta(min_length=1, max_length=4096)] | None = None
    mtime_ns: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    sparse: bool = False
    lane: Lane | None = None
    step: Step | None = None

class FileEntry(Message, frozen=True):
    """One file. ``mode``: permission bits; ``mtime``: seconds since the epoch,
    ``mtime_ns`` the same exactly; ``ino`` and ``nlink``: which entries are names of one
    file; ``ctime_ns``: when it last changed in any way (0: not known). ``raw_path`` and
    ``raw_target``: the bytes of names that are no UTF-8."""

    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    raw_path: bytes | None = None
    raw_target: bytes | None = None
    ino: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    ctime_ns: int = 0

class FileEvent(Message, frozen=True):
    """A line of ``file_watch``. ``change``: ``ready`` (from here on nothing is missed),
    ``created``, ``modified``, ``deleted``, ``overflow`` (changes were lost: look again).
    ``entry``: what is there now, if anything."""

    change: str
    path: str
    raw_path: bytes | None = None
    entry: FileEntry | None = None

class FileReply(Versioned, frozen=True):
    """The final frame of a file verb. ``data`` is the content of a read that came
    without frames; ``size`` the bytes read or stored, of a listing the entries."""

    op_id: OpId
    entry: FileEntry | None = None
    entries: list[FileEntry] | None = None
    data: bytes | None = None
    size: int = 0
    error: WireError | None = None

class ConnectRequest(Versioned, frozen=True):
    """verb ``connect``: a connection to a TCP port of the sandbox's loopback interface
    (127.0.0.1, then ::1). ``wait_s``: how long to wait for something to listen there.
    Input frames go there, ``o`` frames come from there, ``f`` and ``d`` end one direction
    each; the final reply comes when both have ended, ``c`` resets it. ``Dsec-Have`` is
    sent only by a client that has heard of the connection: where it is not known any
    more that is an error, and no new one is made. A client that is silent for
    ``HANGUP_S`` is gone; it answers every ``k`` with ``w``."""

    op_id: OpId
    port: Annotated[int, Meta(ge=1, le=65_535)]
    wait_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0

class ConnectReply(Versioned, frozen=True):
    """The final frame of ``connect``: bytes that went there and came from there. Errors
    about the port have its name as field and ``details.errno``: ECONNREFUSED, ETIMEDOUT,
    ECONNRESET."""

    op_id: OpId
    sent: int = 0
    received: int = 0
    error: WireError | None = None

class InfoRequest(Versioned, frozen=True):
    """verb ``info``: what the edge knows of the sandbox now."""

    op_id: OpId

class InfoReply(Versioned, frozen=True):
    """Live facts of a sandbox. Sizes in bytes, times in seconds. ``time_up``: which time
    limit was reached, where it stands on for its verifier or was paused by it."""

    op_id: OpId
    uid: Uid | None = None
    state: str = ""
    epoch: int = 0
    metrics: dict[str, float] = {}
    enforcement: dict[str, str] = {}
    idle_s: float = 0.0
    time_up: str | None = None
    error: WireError | None = None

class StandingRequest(Versioned, frozen=True):
    """verbs ``pause`` and ``resume``."""

    op_id: OpId

class StandingReply(Versioned, frozen=True):
    """It stands still, or goes on: ``state``. ``failure``: it was tried and could not be
    done, and the sandbox is as before."""

    op_id: OpId
    state: str = ""
    failure: WireError | None = None
    error: WireError | None = None

class PolicyRequest(Versioned, frozen=True):
    """verb ``policy``: other rules for a running (or paused) sandbox. What is ``None``
    stays: ``network_rules`` and ``policy`` replace those of the spec, ``stage`` (of the
    document; empty: none) is put into force, ``offline`` lets nothing out whatever the
    rules say. All of it or nothing."""

    op_id: OpId
    network_rules: dict[Annotated[str, Meta(min_length=1, max_length=255)], bool] | None = None
    policy: dict[str, Any] | None = None
    stage: Annotated[str, Meta(max_length=63)] | None = None
    offline: bool | None = None

class PolicyReply(Versioned, frozen=True):
    """It is in force; ``enforcement`` says by what."""

    op_id: OpId
    enforcement: dict[str, str] = {}
    error: WireError | None = None

class LeaseRequest(Versioned, frozen=True):
    """verb ``verify``: takes or renews the ``lease`` (a name that its holder made up) of a
    verifier for ``lease_s`` seconds; 0 gives it back. While it is held no time limit ends
    the sandbox, within the node's bound. One holder at a time: another's is a
    ``conflict``. ``alone``: everything that runs in the sandbox is killed, and until the
    lease ends only operations with ``Dsec-Lease`` are let in. ``offline``: from here on
    nothing leaves the sandbox, whatever its rules say. It resumes nothing."""

    op_id: OpId
    lease: OpId
    lease_s: Annotated[float, Meta(ge=0, le=LEASE_MAX_S)]
    alone: bool = False
    offline: bool = False

class LeaseReply(Versioned, frozen=True):
    """``held_s``: how long the lease is held without a renewal; ``left_s``, how long it can
    be with renewals."""

    op_id: OpId
    held_s: float = 0.0
    left_s: float = 0.0
    error: WireError | None = None

Grant = Annotated[
    str,
    Meta(pattern=r"^(\*|[a-z]+\.(\*|[a-z_]+))$(?!\n)", description="entity.verb, entity.* or *"),
]

Name = Annotated[str, Meta(min_length=1, max_length=63)]

PolicyName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)")]

PolicyReference = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9][a-z0-9_-]{0,62}(:[1-9][0-9]{0,8})?$(?!\n)",
        description="A policy's name, with a version where it is not the newest",
    ),
]

class Limits(Message, frozen=True):
    """A quota; ``None`` is no limit of its own (ancestors still bound it)."""

    sandboxes: Annotated[int, Meta(ge=0)] | None = None
    cores: Annotated[float, Meta(ge=0)] | None = None
    memory_mb: Annotated[int, Meta(ge=0)] | None = None
    creations_per_s: Annotated[float, Meta(gt=0)] | None = None

class Amounts(Message, frozen=True):
    """What is in use: sandboxes, cores, MiB."""

    sandboxes: int = 0
    cores: float = 0.0
    memory_mb: int = 0

class ProjectCreate(Versioned, frozen=True):
    """``req project.create``: a child of the subject's project. ``id`` is chosen by
    the caller or made from ``name``; it is one token and unique."""

    request_id: str
    name: Name
    id: Token | None = None
    quota: Limits | None = None

class ProjectDelete(Versioned, frozen=True):
    """``req project.delete``: ``id`` is the subject's project or a descendant."""

    request_id: str
    id: Token

class ProjectInfo(Message, frozen=True):
    """A project; ``path`` are the ids from the root."""

    id: Token
    name: str
    parent: Token | None
    path: list[str]
    created_at: UnixTime

class KeyCreate(Versioned, frozen=True):
    """``req key.create``: a new principal with a key. ``grants`` must be held by the
    caller in the project. ``kind`` node or service needs grant ``node.*``."""

    request_id: str
    name: Name
    grants: list[Grant] = []
    kind: Annotated[str, Meta(pattern=r"^(user|service|agent|node)$(?!\n)")] = "user"
    node: Token | None = None
    expires_in_s: Annotated[float, Meta(gt=0)] | None = None

class KeyDelete(Versioned, frozen=True):
    """``req key.delete``."""

    request_id: str
    id: str

class KeyInfo(Message, frozen=True):
    """A key. ``secret`` only in the answer to its creation."""

    id: str
    principal: str
    name: str
    kind: str
    project: Token
    grants: list[str]
    created_at: UnixTime
    expires_at: UnixTime | None = None
    revoked: bool = False
    secret: str | None = None

class GrantCreate(Versioned, frozen=True):
    """``req grant.create``: gives ``principal`` grants in the subject's project and
    everything below it."""

    request_id: str
    principal: str
    grants: Annotated[list[Grant], Meta(min_length=1)]

class GrantDelete(Versioned, frozen=True):
    """``req grant.delete``."""

    request_id: str
    principal: str
    grants: Annotated[list[Grant], Meta(min_length=1)]

class QuotaCreate(Versioned, frozen=True):
    """``req quota.create``: sets the limits of ``project`` (the subject's project's
    own only by someone who holds ``quota.create`` in its parent)."""

    request_id: str
    limits: Limits
    project: Token | None = None

class QuotaInfo(Message, frozen=True):
    """Limits and use of one project; ``used`` counts its descendants too."""

    project: Token
    limit: Limits
    used: Amounts

class PolicyCreate(Versioned, frozen=True):
    """``req policy.create``: a policy of the project under a name, as its next version.
    ``document`` as in a create's ``policy``; the same document again is no new version."""

    request_id: str
    name: PolicyName
    document: dict[str, Any]

class PolicyDelete(Versioned, frozen=True):
    """``req policy.delete``: one version of it, or all."""

    request_id: str
    name: PolicyName
    version: Annotated[int, Meta(ge=1)] | None = None

class PolicyInfo(Message, frozen=True):
    """A named policy. ``document`` is empty in lists."""

    name: str
    version: int
    project: Token
    created_at: UnixTime
    created_by: str
    document: dict[str, Any] = {}

class IamQuery(Versioned, frozen=True):
    """``get project.list|key.list|quota.get|grant.list|whoami.get|policy.get|policy.list``.
    ``policy``: ``name[:version]``."""

    project: Token | None = None
    principal: str | None = None
    policy: PolicyReference | None = None

class IamReply(Versioned, frozen=True):
    """The answer to every iam request: the fields that apply are set."""

    request_id: str | None = None
    project: ProjectInfo | None = None
    projects: list[ProjectInfo] | None = None
    key: KeyInfo | None = None
    keys: list[KeyInfo] | None = None
    quota: QuotaInfo | None = None
    grants: list[str] | None = None
    principal: str | None = None
    policy: PolicyInfo | None = None
    policies: list[PolicyInfo] | None = None

Pool = Literal["onprem", "cloud"]

class FeatureReport(Message, frozen=True):
    """One capability as probed."""

    supported: bool
    reason: str = ""

class BackendStatus(Message, frozen=True):
    """One backend of a node as probed."""

    supported: bool
    reason: str = ""
    features: dict[str, FeatureReport] = {}

class Resources(Message, frozen=True):
    """Amounts: cores, MiB, sandboxes."""

    cores: float = 0.0
    memory_mb: int = 0
    sandboxes: int = 0

class NodeCommand(Versioned, frozen=True):
    """client → auth → scheduler, ``node.<cordon|uncordon|drain>``."""

    request_id: str
    node: Token
    verb: Annotated[str, Meta(pattern=r"^(cordon|uncordon|drain)$(?!\n)")] = "cordon"

class NodeInfo(Message, frozen=True):
    """A node as the watcher sees it. ``state``: ready, cordoned, draining or lost."""

    id: Token
    state: str
    pool: Pool
    capacity: Resources
    committed: Resources
    used: Resources
    backends: dict[str, BackendStatus] = {}
    counts: dict[str, dict[str, int]] = {}
    seen_at: UnixTime = 0.0
    epoch: str = ""

class NodeList(Versioned, frozen=True):
    """Answer of ``node.list``."""

    nodes: list[NodeInfo]

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

JobName = Annotated[str, Meta(min_length=1, max_length=128)]

JobState = Literal["free", "leased", "lapsed"]
"""``free``: nobody ever opened it, its sandboxes only carry its name."""

OnLost = Literal["pause", "stop", "keep"]

class JobRequest(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.job.<open|renew>[.<principal>]``.

    ``holder`` names the process that holds the lease: opening takes the job over from
    any other holder, whose next renewal is a conflict.
    """

    request_id: Uid
    job: JobName
    holder: Uid
    lease_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    on_lost: OnLost = "pause"

class JobInfo(Message, frozen=True):
    """A job. ``epoch`` counts its holders; ``sandboxes`` the live ones by state."""

    project: Token
    job: str
    state: JobState
    epoch: int = 0
    holder: str = ""
    principal: str = ""
    lease_s: float = 0.0
    lease_until: UnixTime | None = None
    on_lost: OnLost = "pause"
    changed_at: UnixTime = 0.0
    sandboxes: dict[str, int] = {}

class JobReply(Versioned, frozen=True):
    """→ the client's inbox."""

    request_id: Uid
    job: JobInfo

class JobQuery(Versioned, frozen=True):
    """client → auth, ``dsec.get.v1.<project>.job.list``. ``after`` is the last name of
    the page before."""

    job: JobName | None = None
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    project: str | None = None

class JobPage(Versioned, frozen=True):
    """Jobs in the order of their names; ``next`` is set where more follow."""

    jobs: list[JobInfo]
    next: str | None = None

Severity = Literal["info", "low", "medium", "high", "critical"]

Response = Literal["alert", "tighten", "freeze", "kill", "quarantine"]

class Finding(Versioned, frozen=True):
    """audit → security team, ``dsec.audit.v1.<project>.<severity>.<rule>``.

    ``count`` is what the rule measured (events, different targets, bytes) from
    ``first_at`` to ``at``, ``total`` all of it since the rule first fired; ``evidence``
    are ids of records. ``response`` is what was asked for, ``refused`` why it could not be,
    ``snapshot`` the name under which the sandbox's disk is kept, ``tighten`` by what the
    sandbox was made stricter.
    """

    id: str
    at: UnixTime
    project: str
    severity: Severity
    rule: str
    explanation: str
    uid: str | None = None
    principal: str | None = None
    evidence: list[str] = []
    confidence: Annotated[float, Meta(ge=0, le=1)] = 1.0
    title: str = ""
    node: str = ""
    job: str | None = None
    task: str | None = None
    count: int = 1
    total: int = 1
    first_at: UnixTime = 0.0
    response: Response = "alert"
    refused: WireError | None = None
    snapshot: str | None = None
    tighten: Tightening | None = None

class AuditQuery(Versioned, frozen=True):
    """``get audit.list``: newest first; ``before`` is the last number of the page before.
    ``kind``: ``access``, ``violation``, ``finding`` or ``retention``; of findings ``verb``
    is the rule and ``outcome`` the severity, of violations the rule and the verdict."""

    project: str | None = None
    principal: str | None = None
    verb: str | None = None
    target: str | None = None
    request_id: str | None = None
    since: UnixTime | None = None
    before: int | None = None
    limit: Annotated[int, Meta(ge=1, le=1000)] = 200
    projects: list[str] = []
    kind: str | None = None
    outcome: str | None = None
    until: UnixTime | None = None
    ids: Annotated[list[str], Meta(max_length=1000)] = []

class AuditEntry(Message, frozen=True):
    """A stored record: its number, its content, and the chain hash over both. ``id``
    names it in queries (``ids``) and in the evidence of findings."""

    seq: int
    kind: str
    record: dict[str, Any]
    hash: str
    id: str = ""

class AuditPage(Versioned, frozen=True):
    """Entries, newest first; ``next`` is set where more follow."""

    entries: list[AuditEntry]
    next: int | None = None

class RuleInfo(Message, frozen=True):
    """A rule of audit. ``measure`` reaches ``threshold`` within ``window_s``."""

    id: str
    title: str
    severity: Severity
    confidence: float
    explanation: str
    threshold: int = 1
    window_s: float = 0.0
    measure: str = "events"
    respond: Response = "alert"

class RulesQuery(Versioned, frozen=True):
    """``get audit.rules``."""

    rule: str | None = None

class RulesReply(Versioned, frozen=True):
    """The rules in force."""

    rules: list[RuleInfo]

class DryRunQuery(Versioned, frozen=True):
    """``get audit.dry_run``: what ``rules`` (a rules file's text) would have found in the
    violations of the record. Nothing is told or done."""

    rules: Annotated[str, Meta(min_length=1, max_length=100_000)]
    project: str | None = None
    since: UnixTime | None = None
    until: UnixTime | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 20_000
    projects: list[str] = []

class DryRunReply(Versioned, frozen=True):
    """``events`` were looked at; ``complete`` is false where there are more of them, or
    more findings than fit."""

    events: int
    findings: list[Finding]
    complete: bool = True

class VerifyQuery(Versioned, frozen=True):
    """``get audit.verify``: a part of the chain. ``after`` and ``hash`` (hex) are where the
    part before ended; without them it begins where the record does."""

    after: int | None = None
    hash: str | None = None

class VerifyReply(Versioned, frozen=True):
    """``seq`` and ``hash``: up to where the chain holds; ``head``: the newest number when
    this part was begun; ``anchor``: the number it begins behind, once older days are
    gone. ``broken_at`` with its ``reason`` where it does not hold."""

    seq: int
    hash: str
    head: int
    anchor: int = 0
    broken_at: int | None = None
    reason: str = ""

class SuggestQuery(Versioned, frozen=True):
    """``get audit.suggest``: the smallest change of policy that would have let through
    what was denied in sandboxes (``uid``, ``job``, ``task``; all of the project)."""

    project: str | None = None
    uid: str | None = None
    job: str | None = None
    task: str | None = None
    since: UnixTime | None = None
    limit: Annotated[int, Meta(ge=1, le=100_000)] = 20_000
    projects: list[str] = []

class Suggestion(Message, frozen=True):
    """One change: ``value`` is added at ``path`` of the policy document (with ``remove``:
    goes from there; ``higher``: a limit is to be). ``count`` denials in
    ``sandboxes`` sandboxes asked for it. ``withheld``: a rule that takes these denials
    for an attack, so it is named and not suggested."""

    path: str
    value: str
    count: int
    sandboxes: int
    reason: str = ""
    withheld: str = ""
    remove: bool = False

class SuggestReply(Versioned, frozen=True):
    """Suggestions, those asked for most first."""

    events: int
    suggestions: list[Suggestion]

class GradingObservation(Message, frozen=True):
    """What a grader saw of an agent's sandbox: a process that still ran when it was
    graded, a test file or a protected file that the agent had changed."""

    what: Literal["process_alive", "test_file_edited", "protected_file_edited"]
    subject: Annotated[str, Meta(min_length=1, max_length=4096)]
    count: Annotated[int, Meta(ge=1, le=1_000_000)] = 1

class SandboxReport(Versioned, frozen=True):
    """client → auth, ``dsec.req.v1.<project>.sandbox.report[.<principal>]``: what a grader
    saw. It counts only where the sandbox is one of that project."""

    request_id: Uid
    uid: Uid
    observations: Annotated[list[GradingObservation], Meta(min_length=1, max_length=256)]

TRAJECTORY_PAGE = 500
"""Records of a page at most."""

OUTPUT_PIECE_BYTES = 256 * 1024
"""Of a whole output, in one message."""

NOTE_BYTES = 1024 * 1024
"""Of a note's content at most."""

Seq = Annotated[int, Meta(ge=0)]

PageSize = Annotated[int, Meta(ge=1, le=TRAJECTORY_PAGE)]

class TrajectoryRecord(Message, frozen=True):
    """One operation. ``request`` and ``reply`` are those of its exec verb, as they were
    sent; a request of ``cut`` bytes was too large to be kept. Without ``ended_at`` its
    end is not known: it runs, or nobody saw its end. ``at`` is no later, and
    ``ended_at`` no earlier, than the times that files carry which it changed; ``begun_at`` is
    exact, so that one which ended before another began is told from it. A reply with
    the error ``unavailable`` or ``capacity_exhausted`` says that it did not begin."""

    uid: Uid
    project: str
    seq: Seq
    op_id: OpId
    verb: str
    principal: str
    at: UnixTime
    lane: Lane | None = None
    step: Step | None = None
    request: dict[str, Any] | None = None
    cut: int = 0
    ended_at: UnixTime | None = None
    reply: dict[str, Any] | None = None
    begun_at: UnixTime | None = None

class TrajectoryRequest(Versioned, frozen=True):
    """verb ``trajectory`` at the edge: records after number ``after``, in order."""

    op_id: OpId
    after: Seq = 0
    limit: PageSize = TRAJECTORY_PAGE

class NoteRequest(Versioned, frozen=True):
    """verb ``note`` at the edge: keeps in the log what a script was told at its place by
    something outside of the sandbox, a model's answer for one. ``about``: SHA-256 of what was
    asked; ``data``: the answer as JSON, deflated (zlib). Nothing reaches the sandbox, and a
    paused one stays so. Answered once it would outlive the node's service; the first note of
    an ``op_id`` stays: another one is a ``conflict``."""

    op_id: OpId
    lane: Lane
    about: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$(?!\n)")]
    data: Annotated[bytes, Meta(max_length=NOTE_BYTES)]
    step: Step | None = None

class NoteReply(Versioned, frozen=True):
    """It is record ``seq``."""

    op_id: OpId
    seq: Seq = 0
    error: WireError | None = None

class TrajectoryQuery(Versioned, frozen=True):
    """``get sandbox.trajectory``: as :class:`TrajectoryRequest`, of what ``node`` has told
    of the sandbox. auth sets ``project``."""

    uid: Uid
    node: Token
    after: Seq = 0
    limit: PageSize = TRAJECTORY_PAGE
    project: str | None = None

class TrajectoryPage(Versioned, frozen=True):
    """Records in order. ``more``: there are records after the last one. Of an edge:
    ``last`` is the highest number there is. Numbers that are missing between are lost, or
    no longer kept."""

    records: list[TrajectoryRecord] = []
    more: bool = False
    last: Seq = 0
    op_id: OpId | None = None
    error: WireError | None = None

Piece = Annotated[int, Meta(ge=0, lt=1 << 20)]

StreamName = Literal["stdout", "stderr"]

class OutputQuery(Versioned, frozen=True):
    """``get sandbox.output``: a piece of what ``node`` has told. auth sets ``project``."""

    uid: Uid
    node: Token
    seq: Seq
    stream: StreamName
    piece: Piece
    project: str | None = None

class OutputPage(Versioned, frozen=True):
    """The piece."""

    data: bytes

DAY_S = 86_400.0

class HotSetQuery(Versioned, frozen=True):
    """``get image.hot_set``: the smallest set of layers that serves ``share`` of the
    sandboxes started in the last ``since_s`` seconds, in all projects."""

    share: Annotated[float, Meta(ge=0, le=1)] = 0.8
    since_s: Seconds = 7 * DAY_S

class HotLayer(Message, frozen=True):
    """A layer of the set. ``hot_bytes`` is what its readers needed, metadata included:
    ``units`` of ``unit_bytes``; all of it where nothing was traced (no ``unit_bytes``)."""

    digest: str
    size_bytes: int
    hot_bytes: int
    unit_bytes: int | None = None
    units: list[int] = []

class HotSet(Versioned, frozen=True):
    """``share`` is what is served: less than was asked for where layers are gone. Layers
    are in the order in which they are worth fetching."""

    share: float
    sandboxes: int
    size_bytes: int
    hot_bytes: int
    layers: list[HotLayer]

SecretName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)")]

SecretValue = Annotated[str, Meta(min_length=1, max_length=8192)]

Host = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?$(?!\n)",
        description="A host name, with a port where it is neither 443 nor 80",
    ),
]

HostPattern = Annotated[
    str,
    Meta(
        pattern=r"^(\*\.)?[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?(:[0-9]{1,5})?$(?!\n)",
        description="A host, or *.domain for all names below it",
    ),
]

HeaderName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$(?!\n)")]

Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$(?!\n)")]

class SecretBinding(Message, frozen=True):
    """How a sandbox uses a secret, at ``hosts`` only. ``header``: every request there gets
    this header with ``format``, whose ``{}`` is the value; one that it has is replaced.
    ``env``: a variable of the sandbox with a placeholder, which becomes the value wherever
    a header of a request there carries it."""

    hosts: Annotated[list[Host], Meta(min_length=1, max_length=16)]
    header: HeaderName | None = None
    format: Annotated[str, Meta(min_length=2, max_length=256)] = "{}"
    env: Variable | None = None

class SecretSet(Versioned, frozen=True):
    """``put secret.set``: a new value, or a first one. ``hosts``: where it may ever go.
    ``plain``: also over HTTP without TLS."""

    request_id: str
    name: SecretName
    value: SecretValue
    hosts: Annotated[list[HostPattern], Meta(min_length=1, max_length=64)]
    plain: bool = False

    def __repr__(self) -> str:
        return f"SecretSet(name={self.name!r}, hosts={self.hosts!r})"

class SecretRemove(Versioned, frozen=True):
    """``put secret.remove``."""

    request_id: str
    name: SecretName

class SecretInfo(Message, frozen=True):
    """A secret without its value. ``version`` counts its values."""

    name: str
    version: int
    hosts: list[str]
    plain: bool
    changed_at: UnixTime
    changed_by: str

class SecretReply(Versioned, frozen=True):
    """The answer about secrets: the fields that apply are set."""

    request_id: str | None = None
    secret: SecretInfo | None = None
    secrets: list[SecretInfo] | None = None

def req(project: str, entity: str, verb: str, principal: str | None = None) -> str:
    """A client's request that changes something. With the principal as last token
    (which the bus lets no one else use) the request is attributed; the short form
    is for trainers without an SDK and is recorded as ``anonymous``."""
    return f"dsec.req.v1.{project}.{entity}.{verb}" + (f".{principal}" if principal else "")

def get(project: str, entity: str, verb: str, principal: str | None = None) -> str:
    """A client's read; forms as in :func:`req`."""
    return f"dsec.get.v1.{project}.{entity}.{verb}" + (f".{principal}" if principal else "")

def put(project: str, entity: str, verb: str, principal: str) -> str:
    """A client's change that no stream may keep; who asks is always named."""
    return f"dsec.put.v1.{project}.{entity}.{verb}.{principal}"

def exec_(project: str, node: str, uid: str, verb: str, principal: str) -> str:
    """A client's operation at the edge that owns the sandbox."""
    return f"dsec.exec.v1.{project}.{node}.{uid}.{verb}.{principal}"

def blob(project: str, verb: str, principal: str) -> str:
    """Bytes of a client's upload to imagesvc (``put``) or of its export (``get``)."""
    return f"dsec.blob.v1.{project}.{verb}.{principal}"

def out(node: str, principal: str, connection: str, op: str) -> str:
    """An edge's answers to one operation of one client connection: the reply
    subject of :func:`exec_` requests. An edge may publish only under its node."""
    return f"dsec.out.v1.{node}.{principal}.{connection}.{op}"

def inbox_prefix(principal: str, connection: str) -> str:
    """The inbox prefix of one client connection; nobody else may listen there."""
    return f"_INBOX.{principal}.{connection}"

def cmd(entity: str, verb: str, key: str) -> str:
    """A command between services; for edges the key is the node."""
    return f"dsec.cmd.v1.{entity}.{verb}.{key}"

def evt_sandbox(project: str, state: str, uid: str) -> str:
    """A sandbox changed state."""
    return f"dsec.evt.v1.sandbox.{project}.{state}.{uid}"

def audit(project: str, severity: str, rule: str) -> str:
    """A finding of audit."""
    return f"dsec.audit.v1.{project}.{severity}.{rule}"

def secrets(node: str) -> str:
    """A node's question for the secrets of one of its sandboxes."""
    return f"dsec.rpc.v1.auth.secrets.{node}"
