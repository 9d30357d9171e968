"""The driver port: what every backend promises. This prose is the specification.

Owns: the vocabulary between the edge's supervisor and a backend. Does not own:
admission, journalling, retries, what a client sees (the supervisor's) or how a
backend works.

Rules for every driver
----------------------
* Calls for *one* sandbox come one at a time from its supervisor, except
  :meth:`Driver.exec`, :meth:`Files` calls and :meth:`Driver.usage`, which run
  concurrently. Calls for different sandboxes run concurrently.
* :meth:`Driver.start` returns only when the sandbox's agent has answered. When it
  raises or is cancelled, nothing of the sandbox is left on the node.
* :meth:`Driver.start` never starts a sandbox with less protection than the spec
  asks for: it raises ``PolicyDenied`` or ``Unsupported`` first.
* :meth:`Driver.stop` is idempotent, legal in every state, and returns when every
  process, mount, cgroup and file of the sandbox is gone.
* A :class:`Handle` is plain data. The supervisor journals it; a new edge process
  passes it to :meth:`Driver.recover` and gets the running sandbox back, or
  ``None`` when it no longer lives. Drivers keep no other durable state.
* :meth:`Driver.sweep` removes whatever carries this node's mark and belongs to no
  known uid: the leftovers of a crash in mid-start.
* Raised errors are :class:`shared.errors.DsecError` or bugs. ``field`` names the
  spec field at fault.
* Nothing blocks the event loop; calls to an engine run in threads with deadlines.
* Text and numbers that come from inside a sandbox are data, bounded and untrusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from shared.policies import Policy

TRUST_PATH = "/dev/dsec-trust.pem"
"""Where a sandbox with secrets finds the authorities it is to trust: in no layer, and in
no snapshot."""

Cause = str  # a cause of shared.lifecycle.CAUSES


@dataclass(frozen=True, slots=True)
class Feature:
    """One capability as the probe found it."""

    supported: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What :meth:`Driver.probe` found. ``features`` are names used as placement
    filters (``exec``, ``files``, ``disk_limit``, ``memory_limit``, ``pause`` …)."""

    supported: bool
    reason: str = ""
    features: Mapping[str, Feature] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layer:
    """One immutable read-only layer, present on this node. Paths are EROFS files:
    ``meta`` (mountable) and ``data`` (its extra device, ``None`` when inline).
    ``origin``: the connection it is read through on demand, empty where it lies here."""

    digest: str
    meta: str
    data: str | None = None
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that requests to ``hosts`` (``host`` or ``host:port``) carry, without its
    value: in ``header`` as ``format`` (``{}``), and instead of ``placeholder``."""

    name: str
    hosts: tuple[str, ...]
    placeholder: str
    header: str | None = None
    format: str = "{}"


@dataclass(frozen=True, slots=True)
class StartSpec:
    """Everything a driver needs. ``layers`` go bottom to top. Sizes in MiB
    (``*_mb``), CPU in cores, ``None`` = not limited; ``disk_mb`` and ``inodes`` are of what
    it writes. ``secrets`` need the feature ``secrets``. ``env``, ``workdir`` and ``user``
    are the defaults of later execs. ``captures`` (ids of :meth:`Snapshotting.capture`,
    bottom to top) lie above the layers; they stay while a sandbox has them."""

    uid: str
    project: str
    layers: Sequence[Layer]
    cpu_cores: float | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    inodes: int | None = None
    pids: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "root"
    policy: Policy = field(default_factory=Policy)
    qos: Literal["best_effort", "latency_sensitive"] = "best_effort"
    hostname: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    captures: Sequence[str] = ()
    secrets: Sequence[Secret] = ()


@dataclass(frozen=True, slots=True)
class Handle:
    """A started sandbox. ``data`` is the driver's own JSON-able data, journalled
    as it is; ``enforcement`` says per protection which mechanism enforces it."""

    uid: str
    backend: str
    data: Mapping[str, Any]
    enforcement: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inspection:
    """The runtime's truth. ``cause`` and ``message`` are set when not alive."""

    alive: bool
    cause: Cause | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Absolute counters and gauges of one sandbox: seconds and bytes. ``net_*`` count its
    connections to the outside since the edge began, ``None`` where nobody counts."""

    cpu_s: float = 0.0
    memory_bytes: int = 0
    memory_peak_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    oom_kills: int = 0
    net_rx_bytes: int | None = None
    net_tx_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Resize:
    """The size of a terminal, both at least 1."""

    rows: int
    cols: int


class ExecSpec(msgspec.Struct, frozen=True):
    """One command. Exactly one of ``argv`` and ``shell`` is set; ``shell`` is run
    by ``/bin/sh -c`` (or as the next command of ``session`` when that is set).
    ``timeout_s`` is enforced inside the sandbox and kills the whole tree, as does
    ``idle_timeout_s`` after so long without output.
    ``output_limit_bytes`` is the budget of *each* stream: head and tail are kept,
    the middle is dropped and counted. ``pty`` puts the command on a controlling
    terminal of that size from its first moment on: its output is one stream
    (``stdout``), waits for a slow reader and is not dropped; the end of input is typed
    (end-of-file character). Without the feature ``pty``: ``Unsupported``."""

    op_id: str
    argv: Sequence[str] | None = None
    shell: str | None = None
    session: str | None = None
    cwd: str | None = None
    env: Mapping[str, str] = {}
    user: str | None = None
    timeout_s: float | None = None
    idle_timeout_s: float | None = None
    output_limit_bytes: int = 10 * 1024 * 1024
    merge: bool = False
    stdin: bool = False
    pty: Resize | None = None


class ExecOutcome(msgspec.Struct, frozen=True):
    """How a command ended. ``exit_code`` is 128+n after signal n; ``signal`` is
    its name without SIG. ``truncated`` are the bytes dropped (stdout, stderr).
    ``session_fresh``: the session's shell was started for this command;
    ``session_ended``: it ended with it."""

    exit_code: int | None
    signal: str | None = None
    timed_out: bool = False
    oom_killed: bool = False
    truncated: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    session_fresh: bool = False
    session_ended: bool = False


Stream = Literal["stdout", "stderr"]


@runtime_checkable
class ExecIO(Protocol):
    """The supervisor's side of a running command."""

    async def output(self, stream: Stream, data: bytes) -> None:
        """Takes output in order. Waits where the reader is slow."""
        ...

    def input(self) -> AsyncIterator[bytes]:
        """Chunks for stdin; its end closes stdin. Used when ``spec.stdin``. Called
        again it goes on after what was taken."""
        ...

    def control_to(self, take: Callable[[str | Resize], None]) -> None:
        """From now on calls ``take`` with the names of signals to send to the command
        (``TERM``, ``KILL`` …; ``0`` only asks whether it is there) and the sizes of its
        terminal, in order. None is lost: what came before is given at once. A call and
        no iterator, because hardly a command gets any and each would cost a task."""
        ...


@runtime_checkable
class ResumeIO(ExecIO, Protocol):
    """The supervisor's side of a command that is followed again."""

    async def resumes(self, *, taken: int, terminal: bool, base: tuple[int, int] = (0, 0)) -> None:
        """Told before anything else: the command was given ``taken`` bytes of input;
        on a ``terminal`` only new output comes, else stdout and stderr from ``base`` on."""
        ...


@dataclass(frozen=True, slots=True)
class Exited:
    """A sandbox died on its own (agent channel closed, OOM of the whole sandbox)."""

    uid: str
    cause: Cause
    message: str = ""


OnExit = Callable[[Exited], Awaitable[None]]


class Driver(Protocol):
    """A backend. See the module's prose for the rules."""

    name: str

    async def probe(self) -> BackendReport:
        """What this node can do. Never raises; called before :meth:`open` and then
        from time to time."""
        ...

    async def open(self, on_exit: OnExit) -> None:
        """Begins work (fills pools). ``on_exit`` is told of deaths."""
        ...

    async def close(self) -> None:
        """Ends work. Running sandboxes live on; pools and helpers are removed."""
        ...

    async def start(self, spec: StartSpec) -> Handle: ...

    async def recover(self, handle: Handle, spec: StartSpec) -> Handle | None: ...

    async def inspect(self, handle: Handle) -> Inspection: ...

    async def exec(self, handle: Handle, spec: ExecSpec, io: ExecIO) -> ExecOutcome:
        """Runs one command. Cancelling the call kills the command's tree.
        ``Unavailable`` says that it did not begin; a channel that breaks while it
        runs is ``SandboxDied``."""
        ...

    async def usage(self, handle: Handle) -> Usage: ...

    async def stop(self, handle: Handle, *, grace_s: float = 0.0) -> None: ...

    async def sweep(self, known: frozenset[str]) -> list[str]:
        """Removes leftovers of sandboxes not in ``known``; returns their uids."""
        ...


class PortIO(Protocol):
    """The supervisor's side of one connection."""

    async def connected(self) -> None:
        """Told once, before anything else."""
        ...

    async def output(self, stream: Stream, data: bytes) -> None:
        """Takes what the other end sent (as ``stdout``), in order. Waits where the
        reader is slow."""
        ...

    async def output_ended(self) -> None:
        """The other end sends no more. It may still read."""
        ...

    def input(self) -> AsyncIterator[bytes]:
        """What to send; its end shuts down this direction only."""
        ...


@runtime_checkable
class Ports(Protocol):
    """Optional (feature ``ports``): what listens on a sandbox's loopback interface."""

    async def dial(self, handle: Handle, port: int, io: PortIO, *, wait_s: float = 0.0) -> None:
        """Connects to 127.0.0.1, then ::1, from within the sandbox's network, and returns
        when both directions have ended. While nothing listens it tries again for
        ``wait_s``. Cancelling resets the connection.

        Errors have ``field`` ``port`` and ``details["errno"]``: ``NotFound`` where
        nothing listens (``ECONNREFUSED``), ``DeadlineExceeded`` where the listener takes
        no connection (``ETIMEDOUT``), ``Conflict`` where it broke off (``ECONNRESET``)."""
        ...


@runtime_checkable
class Accepting(Protocol):
    """Optional (feature ``routes``): connections that begin in the sandbox."""

    async def accept(
        self, handle: Handle, port: int, io: PortIO, *, listens: asyncio.Event
    ) -> None:
        """Listens on 127.0.0.1 within the sandbox's network, sets ``listens``, waits for one
        connection to ``port``, and returns when both its directions have ended. Between two
        calls connections wait. Cancelling resets the connection. ``Conflict`` (field
        ``port``) where something of the sandbox listens there, or where it broke off."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """Optional: commands that outlive the edge process."""

    async def resume_exec(
        self, handle: Handle, op_id: str, io: ResumeIO, *, stdin: bool = False
    ) -> ExecOutcome | None:
        """Follows a command of an earlier edge process: its retained output from the
        start (a terminal's: what comes from now on), then its outcome. ``None`` when
        nobody knows it: then it did not run, or its outcome is lost."""
        ...

    async def commands(self, handle: Handle) -> int:
        """How many commands run, whoever began them."""
        ...

    def let_go(self) -> None:
        """The edge ends: from now on cancelling :meth:`Driver.exec` leaves the command
        running, to be resumed."""
        ...


@runtime_checkable
class Pausable(Protocol):
    """Optional: a sandbox that stands still and costs no CPU. A paused sandbox answers
    :meth:`Driver.stop`, :meth:`Driver.inspect` and :meth:`Driver.usage`; the supervisor
    resumes it before anything else.

    Commands stand still too, whole trees, and go on as if no time had passed: a
    ``timeout_s`` counts what a command runs. One that a driver was just given begins
    when the sandbox goes on. A pause survives the edge: after :meth:`Driver.recover` the
    supervisor calls :meth:`pause` or :meth:`resume`, whichever its journal says, and
    both bring about that state whatever was left."""

    async def pause(self, handle: Handle) -> None:
        """Idempotent. Returns when every process stands still; when it raises or is
        cancelled, the sandbox runs as before."""
        ...

    async def resume(self, handle: Handle) -> None:
        """Idempotent. Returns when the sandbox has proved that it lives; when it raises
        or is cancelled, one that was paused still is."""
        ...

    async def reclaim(self, handle: Handle) -> int:
        """Gives memory of a paused sandbox back to the node; how many bytes. Its content
        stays. Takes long and is cancelled before a resume or a stop: then it ends within
        a moment. Whenever it has ended, limits are as they were. Raises ``Unavailable``
        where the sandbox cannot stay paused."""
        ...
