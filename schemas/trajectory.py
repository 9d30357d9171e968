"""Messages of the trajectory log: what was done in a sandbox, in which order, how it ended.

An edge writes a record of every operation that changes a sandbox, and of every one that
carries a place in a script (``lane`` and ``step``): the intent before, the result after.
Records are numbered without a hole in each sandbox (``seq``), over restarts of the edge.
They are asked for at the edge while the sandbox lives (the exec verb ``trajectory``), and
of the services for ever after (``dsec.get.v1.<project>.sandbox.trajectory``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from schemas.base import Message, Token, Uid, UnixTime, Versioned, WireError
from schemas.exec import Lane, OpId, Step

TRAJECTORY_PAGE = 500
"""Records of a page at most."""
TRAJECTORY_PAGE_BYTES = 960 * 1024
"""A page is full with this much: one of several records fits any server's messages."""
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


class TrajectoryRecords(Versioned, frozen=True):
    """edge → audit, ``dsec.trj.v1.<node>``: new records, and known ones that ended."""

    node: Token
    records: list[TrajectoryRecord]


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


class OutputPiece(Versioned, frozen=True):
    """edge → audit, ``dsec.rpc.v1.audit.output.<node>``: ``OUTPUT_PIECE_BYTES`` (the last
    one fewer) of an output that a record refers to. Answered with ``Ok`` once it is kept."""

    uid: Uid
    project: Token
    seq: Seq
    stream: StreamName
    piece: Piece
    data: Annotated[bytes, Meta(max_length=OUTPUT_PIECE_BYTES)]


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


def output_of(node: str) -> str:
    """Where a node's pieces go."""
    return f"dsec.rpc.v1.audit.output.{node}"
