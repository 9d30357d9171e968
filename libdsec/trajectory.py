"""What was done in a sandbox: its trajectory, record by record.

Owns: records as users see them, which of them may have changed a file. Does not own: where
the log is (:mod:`libdsec._log`), scripts that run again (:mod:`libdsec.forward`).
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from libdsec._asking import answer_of, unpacked
from libdsec._log import Entry, completed, did_not_begin, entries
from libdsec._wire import ExecReply, WireError
from libdsec.errors import DSecError, FileNotFound, InternalError, Unsupported, from_wire
from libdsec.process import result_of
from libdsec.results import ExecResult, FileInfo

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

State = Literal["done", "open", "refused", "lost"]
STAMP_S = 1e-6
"""What is lost of a time in nanoseconds as a float of seconds."""


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """One operation, number ``seq`` of its sandbox. ``state``: ``done``; ``open``, it runs
    or nobody saw its end; ``refused``, it did not begin; ``lost``, ``missing`` numbers from
    ``seq`` on have no record. ``verb``: ``exec`` or a file verb; ``command`` in words,
    ``request`` as it was sent (``None`` where it was too large to be kept). ``result`` of a
    command, with its output as far as it is kept (``truncated``); ``error`` of an operation
    that failed. ``answer`` of a ``note``: what a script was told (:meth:`FastForward.ask`). ``at``,
    ``ended_at``: seconds since the epoch, so that the times of files it changed lie between;
    ``begun_at``: exactly when it began, where that is known."""

    seq: int
    state: State
    verb: str = ""
    command: str = ""
    op_id: str = ""
    principal: str = ""
    at: float = 0.0
    ended_at: float | None = None
    lane: str | None = None
    step: int | None = None
    missing: int = 0
    request: dict[str, Any] | None = None
    reply: dict[str, Any] | None = field(default=None, repr=False)
    result: ExecResult | None = None
    error: DSecError | None = None
    answer: Any = None
    begun_at: float | None = None

    @property
    def is_infra(self) -> bool:
        """Whether it failed by the infrastructure: a trainer masks it."""
        return self.error is not None and self.error.is_infra

    def to_json(self) -> dict[str, Any]:
        """A line of the export: plain data, bytes as base64."""
        names = ("seq", "state", "verb", "command", "op_id", "principal", "at", "ended_at",
                 "lane", "step", "missing", "request", "reply", "answer", "begun_at")  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value not in (None, "", 0)}


@dataclass(frozen=True, slots=True)
class Provenance:
    """What may have changed ``path`` last, at ``changed_at``: the operations during which it
    was changed, oldest first. One is the answer; several ran at that time, or within one tick
    of the kernel's clock; none means that it came with the image, or that something which a
    command had left running did it. ``path`` is a directory above where the file itself is
    gone: then it is the removal of one of its entries that is looked for."""

    path: str
    changed_at: float
    candidates: tuple[TrajectoryRecord, ...] = ()

    @property
    def certain(self) -> bool:
        """Whether one operation alone comes into question."""
        return len(self.candidates) == 1


class Trajectory:
    """An async iterator of :class:`TrajectoryRecord`, oldest first, of a sandbox in any
    state. Its end is the last operation that was begun when the end was reached."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._records: AsyncIterator[TrajectoryRecord] | None = None

    def __repr__(self) -> str:
        return f"Trajectory({self._sandbox.id!r})"

    def __aiter__(self) -> Trajectory:
        return self

    async def __anext__(self) -> TrajectoryRecord:
        if self._records is None:
            self._records = self._read()
        return await self._records.__anext__()

    async def _read(self) -> AsyncIterator[TrajectoryRecord]:
        async for entry in entries(self._sandbox):
            yield record_of(entry)

    async def whole(self, record: TrajectoryRecord) -> TrajectoryRecord:
        """The record with all of a command's output, of which it may hold head and tail
        alone; what the services do not have stays as it is."""
        if record.verb != "exec" or not (record.reply or {}).get("whole"):
            return record
        reply = msgspec.convert(record.reply, ExecReply)
        reply = await completed(self._sandbox, record.seq, reply)
        return replace(
            record, reply=msgspec.to_builtins(reply), result=result_of(reply, b"", b"")
        )

    async def changed(self, path: str, *, user: str | None = None) -> Provenance:
        """Which operation changed a file last (content, mode, owner, name): the one during
        which the file system's own change time falls, which nothing in the sandbox can set.
        The sandbox must live. Raises ``FileNotFound`` where there is not even a directory
        above, ``Unsupported`` where the backend does not tell change times."""
        info = await self._present(path, user)
        if not info.ctime_ns:
            raise Unsupported("this backend does not tell when a file was changed", field="path")
        at = info.ctime_ns / 1e9
        found = [record async for record in Trajectory(self._sandbox) if _covers(record, at)]
        named = [record for record in found if _names(record, info.path)]
        return Provenance(info.path, at, tuple(named or found))

    async def _present(self, path: str, user: str | None) -> FileInfo:
        while True:
            try:
                return await self._sandbox.files.stat(path, user=user)
            except FileNotFound:
                above = posixpath.dirname(path.rstrip("/")) or "."
                if above in (path, "/"):
                    raise
                path = above


def _covers(record: TrajectoryRecord, at: float) -> bool:
    if record.state not in ("done", "open") or record.verb in _LOOKS:
        return False
    return record.at - STAMP_S <= at and (
        record.ended_at is None or at <= record.ended_at + STAMP_S
    )


_LOOKS = frozenset({"file_read", "file_stat", "file_list", "file_pack", "note"})


def _names(record: TrajectoryRecord, path: str) -> bool:
    """Whether it is a file verb on this very file: then it is no other."""
    request = record.request or {}
    return record.verb != "exec" and path in (request.get("path"), request.get("target"))


def record_of(entry: Entry) -> TrajectoryRecord:
    """A record as users see it."""
    wire = entry.record
    if wire is None:
        return TrajectoryRecord(entry.seq, "lost", missing=entry.missing)
    state: State = "open" if wire.ended_at is None else "done"
    if did_not_begin(wire):
        state = "refused"
    result, error = _end(wire.verb, wire.reply)
    return TrajectoryRecord(
        wire.seq, state, verb=wire.verb, command=shown(wire.verb, wire.request),
        op_id=wire.op_id, principal=wire.principal, at=wire.at, ended_at=wire.ended_at,
        lane=wire.lane, step=wire.step, request=wire.request, reply=wire.reply,
        result=result, error=error, answer=_answer(entry), begun_at=wire.begun_at,
    )  # fmt: skip


def _answer(entry: Entry) -> Any:
    """``None`` also where it cannot be read: ``request`` has it as it is."""
    note = answer_of(entry)
    with contextlib.suppress(InternalError):
        return unpacked(note) if note is not None else None


def _end(
    verb: str, reply: dict[str, Any] | None
) -> tuple[ExecResult | None, DSecError | None]:
    if reply is None:
        return None, None
    if (failed := reply.get("error")) is not None:
        return None, from_wire(msgspec.convert(failed, WireError))
    if verb != "exec":
        return None, None
    return result_of(msgspec.convert(reply, ExecReply), b"", b""), None


def shown(verb: str, request: dict[str, Any] | None) -> str:
    """An operation in words."""
    if request is None:
        return f"{verb} (not kept)"
    if verb == "note":
        return f"ask {request.get('about', '')[:12]}"
    if verb != "exec":
        target = f" {request['target']}" if "target" in request else ""
        return f"{verb} {request.get('path', '')}{target}"
    shell: str | None = request.get("shell")
    return shell if shell is not None else " ".join(request.get("argv") or ())
