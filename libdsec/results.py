"""What calls return: command results and a sandbox's facts.

Owns: plain values with text views. Does not own: getting them.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import Any, Literal

from libdsec._wire import SandboxInfo


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. Output is bytes; ``truncated`` counts the bytes dropped
    of (stdout, stderr) by the output limit, which keeps head and tail.
    ``exit_code`` is 128+n after signal n; ``signal`` its name without SIG. ``seq``
    numbers the commands of the sandbox; ``epoch`` changes when it was restarted. In a
    session: ``session_fresh``, its shell was started for this command, with no state of
    earlier ones; ``session_ended``, the shell ended with it."""

    exit_code: int | None
    signal: str | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    oom_killed: bool = False
    truncated: tuple[int, int] = (0, 0)
    duration_s: float = 0.0
    seq: int = 0
    op_id: str = ""
    epoch: int = 0
    session_fresh: bool = False
    session_ended: bool = False

    @property
    def ok(self) -> bool:
        """Exit code 0 and no time-out."""
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        """stdout as text: UTF-8, what is not becomes U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """stderr as text, as :attr:`text`."""
        return self.stderr.decode("utf-8", "replace")

    def __repr__(self) -> str:
        shown = [f"exit_code={self.exit_code}"]
        shown += [f"{n}={v!r}" for n in ("signal",) if (v := getattr(self, n))]
        shown += [n for n in ("timed_out", "oom_killed", "session_ended") if getattr(self, n)]
        if any(self.truncated):
            shown.append(f"truncated={self.truncated}")
        shown += [f"stdout={_short(self.stdout)}", f"stderr={_short(self.stderr)}"]
        return f"ExecResult({', '.join(shown)}, duration_s={self.duration_s:.3f})"


def _short(data: bytes, limit: int = 60) -> str:
    return repr(data) if len(data) <= limit else f"{data[:limit]!r}…({len(data)} bytes)"


@dataclass(frozen=True, slots=True)
class Info:
    """A sandbox's facts. ``limits`` are what it was created with; ``usage`` is live
    (empty where it does not run), keys as :meth:`Sandbox.metrics`;
    ``enforcement``: protection → mechanism. ``time_up``: the time limit (``idle_timeout``,
    ``deadline``) that ended or paused it, or that its verifier has it stand on after."""

    id: str | None
    uid: str
    project: str
    state: str
    node: str | None
    backend: str
    cause: str | None = None
    is_infra: bool = False
    message: str = ""
    job: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    enforcement: dict[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    changed_at: float = 0.0
    request_id: str | None = None
    time_up: str | None = None


LIMITS = (
    "cpu_cores_limit", "memory_limit_mb", "disk_limit_mb", "pids_limit", "ttl_running_stop",
    "deadline_s", "on_timeout",
)  # fmt: skip


def info_of(found: SandboxInfo) -> Info:
    """The facts as the scheduler knows them."""
    spec = found.spec
    limits = {n: getattr(spec, n) for n in LIMITS} if spec else {}
    return Info(
        id=found.id,
        uid=found.uid,
        project=found.project,
        state=found.state,
        node=found.node,
        backend=found.backend,
        cause=found.cause,
        is_infra=found.is_infra,
        message=found.message or (found.error.message if found.error else ""),
        job=found.job,
        labels=dict(found.labels),
        limits={n: v for n, v in limits.items() if v is not None},
        enforcement=dict(found.enforcement),
        created_at=found.created_at,
        changed_at=found.changed_at,
        request_id=found.request_id,
        time_up=found.time_up,
    )


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file. ``type``: file, dir, symlink, fifo, socket, chr or blk; ``size`` in bytes;
    ``mode``: permission bits; ``mtime``: seconds since the epoch, ``mtime_ns`` exactly;
    ``ctime_ns`` when anything of it last changed (0: not known);
    ``target`` of a symbolic link; entries of one ``ino`` are names of one file, which has
    ``nlink``. Names that are no UTF-8 are as ``os.fsdecode`` has them."""

    path: str
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    mtime: float
    target: str | None = None
    ino: int = 0
    nlink: int = 1
    mtime_ns: int = 0
    ctime_ns: int = 0

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rpartition("/")[2]

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.type in ("directory", "dir")


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file was ``created``, ``modified`` or ``deleted``; ``info`` is what is there now,
    if anything. ``overflow``: changes came faster than they were told, some are missing;
    ``ready``: the watch has begun."""

    kind: Literal["created", "modified", "deleted", "overflow", "ready"]
    path: str
    info: FileInfo | None = None


@dataclass(frozen=True, slots=True)
class TreeCopy:
    """What a tree's transfer did. ``files`` and ``bytes`` were sent, ``skipped`` files were
    there already; ``left_out``: links that would have led outside, relative names."""

    files: int = 0
    bytes: int = 0
    skipped: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A sandbox changed state."""

    uid: str
    id: str | None
    state: str
    at: float
    node: str | None = None
    backend: str = ""
    cause: str | None = None
    is_infra: bool = False
    message: str = ""
    job: str | None = None
    labels: dict[str, str] = field(default_factory=dict)


class TextView:
    """Decodes a stream of bytes incrementally, so that a character split over two
    chunks stays one."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes, *, final: bool = False) -> str:
        """The text that is complete with ``data``."""
        return self._decoder.decode(data, final)
