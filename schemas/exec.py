"""Messages at the edge's door: exec, files, and the frames of their streams.

A request goes to ``dsec.exec.v1.<project>.<node>.<uid>.<verb>.<principal>`` with a
reply subject ``dsec.out.v1.<node>.<principal>.<connection>.<op>``. Everything the edge
answers for that operation comes there, in order, as *frames*: the header
``Dsec-Frame`` says which.

====== ======================== ================================================
frame  from                     body
====== ======================== ================================================
``o``  edge → client            raw bytes of stdout (or of the file read)
``e``  edge → client            raw bytes of stderr
``k``  edge → client            the operation lives (every few seconds); decimal seconds
                                that its sandbox was paused, then a space and ``p`` while it is
``r``  edge → client            ready for input (``i`` frames); ``connect``: connected
``d``  edge → client            ``connect``: end of output; input may go on
``a``  edge → client            decimal count of input bytes taken so far
``x``  edge → client            the final reply as JSON; always last
``i``  client → edge, verb io   raw bytes of input (stdin, file content)
``f``  client → edge, verb io   end of input
``s``  client → edge, verb io   a signal name
``z``  client → edge, verb io   new size of the terminal: decimal rows, space, columns
``w``  client → edge, verb io   decimal count of output bytes taken so far
``c``  client → edge, verb io   cancel: kill the tree, then the final reply
====== ======================== ================================================

A message to the client without ``Dsec-Frame`` is an ``x`` before which no frame came.
Frames from a client carry the operation id in ``Dsec-Op``. Each side keeps at
most ``WINDOW_BYTES`` unacknowledged: that is the flow control. Counts begin with the
operation; ``w`` counts stdout and stderr together.

A client that missed something, or heard nothing for three ``KEEPALIVE_S``, sends the
same request again with a new last token of the reply subject. From then on frames come
there: first the output it has not acknowledged, with ``Dsec-Offset``; where the edge
waits for input, ``r`` and ``a``, and the client sends on from that count. Such a request
says with ``Dsec-Have`` what output the client has, if it has heard anything: an edge that
was restarted meanwhile follows the running command again and goes on from there.

A ``file_read`` goes on at an edge that was restarted where it says by ``Dsec-Source``
which file it was about: the file must still be the same and unchanged. Streamed input of
``file_write`` and ``file_unpack`` goes on from what the sandbox has. What cannot go on is
refused with ``conflict`` and the errno ``ESTALE``: the client begins again, under a new
operation id. A client answers every ``k`` of a file verb with ``w``, as at a terminal.

A *bundle* is many small files in one stream: a row of entries, each a row of fields (``u8
tag, u32 length, bytes``; numbers are 8 bytes; all little-endian): 70 name, relative to the
request's path; 71 type (``f`` file, ``d`` directory, ``l`` symbolic link, ``h`` another
name of the file that the target names); 72 size; 73 permission bits; 76 modification time in ns;
77 target of a link; and as the last one 69, the content.

Another client of the same principal attaches by ``attach``: ``r`` and ``a`` come first
where the command takes input, else ``k``; then the output that is retained.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Message, Uid, Versioned, WireError

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
HANGUP_S = 60.0
"""A client at a terminal that is silent for this long has hung up: its command's tree is
killed. It answers every ``k`` with ``w``."""
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
LATE_BYTES = 4 * 1024
"""Output of both streams that a ``late`` request gets inside the final reply."""
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


ExecVerb = Literal[
    "exec", "io", "info", "connect", "pack", "file_read", "file_write", "file_stat", "file_list",
    "file_mkdir", "file_remove", "file_move", "file_pack", "file_unpack", "file_watch",
    "trajectory", "note", "policy", "verify", "pause", "resume",
]  # fmt: skip
