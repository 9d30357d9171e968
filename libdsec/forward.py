"""Fast-forward: a script that runs again gets what is recorded, then goes on for real.

Owns: places of operations in a script, what is answered from the log. Does not own: the
log (:mod:`libdsec._log`).

The calls of a lane are numbered in the order in which they begin. The number, not the
clock, makes an operation's id: so what was begun at a place can never begin there again,
whether or not the log was read in time.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from libdsec import _asking, _ids
from libdsec._asking import Asked
from libdsec._command import attach_request
from libdsec._core import TERMINAL
from libdsec._log import Entry, Log, completed
from libdsec._operation import Operation
from libdsec._settled import Followed, Recorded
from libdsec._wire import (
    ExecReply,
    FileReply,
    NoteReply,
    NoteRequest,
    TrajectoryRecord,
    encode,
)
from libdsec.errors import Conflict, Divergence, InvalidRequest, OutcomeUnknown
from libdsec.files import Files, LocalPath
from libdsec.results import FileInfo, TreeCopy
from libdsec.sandbox import Sandbox
from libdsec.trajectory import shown

R = TypeVar("R", bound=msgspec.Struct)

COUNTED = frozenset(
    {
        "exec", "file_read", "file_write", "file_stat", "file_list", "file_mkdir",
        "file_remove", "file_move", "file_pack", "file_unpack",
    }
)  # fmt: skip
REPEATABLE = frozenset(
    {"file_read", "file_write", "file_stat", "file_list", "file_pack", "file_unpack"}
)
"""Verbs that may be done once more where nobody knows whether they ended."""
FRAMED = frozenset({"file_list", "file_pack"})
INCIDENTAL = frozenset(
    {
        "v", "op_id", "lane", "step", "timeout_s", "idle_timeout_s", "output_limit_bytes",
        "stream", "late", "mtime_ns",
    }
)  # fmt: skip
"""Fields that make no other operation of a request: limits, and how the answer comes."""
LANE_MAX = 48
NOTE_TRIES = 3


def lane_of(name: str) -> str:
    """Raises ``InvalidRequest`` for a name that is too long."""
    if not isinstance(name, str) or not 1 <= len(name) <= LANE_MAX:
        raise InvalidRequest(f"a lane's name has 1 to {LANE_MAX} characters", field="lane")
    return name


class FastForward(Sandbox):
    """The same sandbox, for a script that may have run before. Calls return what is recorded
    at their place; an operation that still runs is followed; the first one without a record
    runs. Another operation than the recorded one is ``Divergence``; one whose end nobody
    knows is ``OutcomeUnknown`` and never runs again by itself. Calls are counted in the
    order in which they begin: those of tasks whose order may change take a :meth:`thread`
    each. Leaving the block ends nothing."""

    def __init__(self, sandbox: Sandbox, lane: str = "main", log: Log | None = None) -> None:
        super().__init__(
            sandbox._core, sandbox.uid, project=sandbox.project, state=sandbox.state,
            id=sandbox._id, node=sandbox._node, job=sandbox.job, labels=sandbox.labels,
        )  # fmt: skip
        self._lease = sandbox._lease
        self.lane = lane
        self.step = 0
        """The place of the last call."""
        self.replayed = 0
        """Calls that were answered from the log."""
        self._log = log or Log(sandbox)
        self.files: Files = _Files(self)

    def __repr__(self) -> str:
        return f"FastForward({self.id!r}, lane={self.lane!r}, step={self.step})"

    async def __aenter__(self) -> FastForward:
        await self._log.read()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        return None

    def thread(self, name: str) -> FastForward:
        """The same for calls that are counted by themselves, as ``name`` of this lane."""
        return FastForward(self, lane_of(f"{self.lane}:{name}"), self._log)

    async def ask(self, question: Any, asked: Asked) -> Any:
        """What ``asked(question)`` says, a model for one: called once at this place, and what
        it said is in the log before it is returned, so that a script that runs again gets it
        from there. Question and answer are JSON, and the answer comes as JSON has it. Another
        question at a recorded place is ``Divergence``. Raises what ``asked`` raises (nothing is
        recorded then, and the next call takes this place), ``InvalidRequest`` for an answer over
        a MiB (deflated), ``Unsupported`` where the node keeps no log.

        Nothing reaches the sandbox; a paused one stays so. ``asked`` is called again where a
        process died before the answer was kept; where two ask at one place, the answer that was
        kept first is both's."""
        about = _asking.about(question)
        self.step += 1
        step = self.step
        try:
            return _asking.unpacked(await self._asked(step, about, question, asked))
        except BaseException:
            if self.step == step:
                self.step -= 1
            raise

    async def _asked(self, step: int, about: str, question: Any, asked: Asked) -> bytes:
        lane = self.lane
        known = _said(await self._recorded(lane, step), about)
        if known is not None:
            self.replayed += 1
            return known
        if self.state in TERMINAL and (dead := await self._verdict()) is not None:
            raise dead
        answer = _asking.packed(await _asking.told(asked, question))
        return await self._note(lane, step, about, answer)

    async def _note(self, lane: str, step: int, about: str, data: bytes) -> bytes:
        """Keeps an answer; the one that is kept. A note whose text died with its node's
        service, before anybody was told that it is kept, has used up its id."""
        for number in range(NOTE_TRIES):
            op_id = _ids.named(self.uid, lane, str(step), *([str(number)] if number else []))
            note = NoteRequest(op_id=op_id, lane=lane, about=about, data=data, step=step)
            try:
                await self._answer("note", note, NoteReply)
                return data
            except Conflict as exc:
                if exc.field != "op_id":
                    raise
            await self._log.again()
            if (kept := _said(self._log.at(lane, step), about)) is not None:
                return kept
        raise OutcomeUnknown(f"{lane} step {step}: the answer could not be kept", is_infra=True)

    async def _recorded(self, lane: str, step: int) -> Entry | None:
        """What is recorded at a place."""
        await self._log.read()
        if self.state in TERMINAL:
            await self._log.settled(lane, step)
        return self._log.at(lane, step)

    async def _start(
        self, verb: str, request: Any, reply_type: type[R], *, joining: int | None = None,
        kind: type[Operation[R]] = Operation,
    ) -> Operation[R]:  # fmt: skip
        if verb not in COUNTED or joining is not None:
            return await super()._start(verb, request, reply_type, joining=joining, kind=kind)
        self.step += 1
        lane, step = self.lane, self.step
        op_id = _ids.named(self.uid, lane, str(step))
        request = msgspec.structs.replace(request, op_id=op_id, lane=lane, step=step)
        entry = await self._recorded(lane, step)
        if entry is not None:
            _compare(entry, verb, request)
        return await self._resolve(entry, verb, request, reply_type)

    async def _resolve(
        self, entry: Entry | None, verb: str, request: Any, reply_type: type[R]
    ) -> Operation[R]:
        """The operation of a place: as it is recorded, followed, or begun now."""
        record = entry.record if entry else None
        if entry is None or record is None:
            return await super()._start(verb, request, reply_type)
        if record.ended_at is not None:
            reply = msgspec.convert(record.reply, reply_type)
            if not _is_partial(reply):
                if isinstance(reply, ExecReply) and reply.whole:
                    reply = cast(R, await completed(self, record.seq, reply))
                self.replayed += 1
                return self._settled(verb, request, reply)
        elif verb == "exec":
            attached = attach_request(record.op_id, 0)
            return await super()._start("exec", attached, reply_type, joining=0, kind=Followed)
        elif not (entry.held or (verb in REPEATABLE and not request.append)):
            raise OutcomeUnknown(
                f"{record.lane} step {record.step} ({shown(verb, record.request)}): nobody "
                "knows how it ended", is_infra=True,
            )  # fmt: skip
        return await super()._start(verb, request, reply_type)

    def _settled(self, verb: str, request: Any, reply: R) -> Operation[R]:
        operation = Recorded[R](
            self._core.operations, (self.project, self._node or "", self.uid), verb=verb,
            request=request, reply_type=type(reply), verdict=self._verdict,
        )  # fmt: skip
        for kind, name in _framed(verb, request).items():
            if data := getattr(reply, name):
                operation.output.append((kind, data))
                reply = msgspec.structs.replace(reply, **{name: type(data)()})
        operation.finish(reply)
        return operation


class _Whole(FastForward):
    """Calls of many operations at once, in any order: the operations of the one at
    ``lane`` are told apart by what they are, not by their place."""

    def __init__(self, forward: FastForward) -> None:
        forward.step += 1
        super().__init__(forward, f"{forward.lane}/{forward.step}", forward._log)
        self._count: Counter[str] = Counter()

    async def _start(
        self, verb: str, request: Any, reply_type: type[R], *, joining: int | None = None,
        kind: type[Operation[R]] = Operation,
    ) -> Operation[R]:  # fmt: skip
        if verb not in COUNTED or joining is not None:
            return await Sandbox._start(
                self, verb, request, reply_type, joining=joining, kind=kind
            )
        what = verb + json.dumps(_essence(msgspec.to_builtins(request)), sort_keys=True)
        self._count[what] += 1
        number = self._count[what]
        op_id = _ids.named(self.uid, self.lane, what, str(number))
        request = msgspec.structs.replace(request, op_id=op_id, lane=self.lane, step=None)
        await self._log.read()
        return await self._resolve(self._log.operation(op_id), verb, request, reply_type)


class _Files(Files):
    """``files`` of a script that runs again. A call on many files has one place."""

    def __init__(self, forward: FastForward) -> None:
        super().__init__(forward)
        self._forward = forward

    async def glob(self, pattern: str, *, user: str | None = None) -> Sequence[FileInfo]:
        return await Files(_Whole(self._forward)).glob(pattern, user=user)

    async def upload_tree(self, local: LocalPath, remote: str, **options: Any) -> TreeCopy:
        return await Files(_Whole(self._forward)).upload_tree(Path(local), remote, **options)

    async def download_tree(self, remote: str, local: LocalPath, **options: Any) -> TreeCopy:
        return await Files(_Whole(self._forward)).download_tree(remote, Path(local), **options)


def _framed(verb: str, request: Any) -> dict[str, str]:
    """Parts of a reply that came in frames, by kind of frame."""
    if verb == "exec" and request.stream and not request.late:
        return {"o": "stdout", "e": "stderr"}
    return {"o": "data"} if verb in FRAMED else {}


def _compare(entry: Entry, verb: str, request: Any) -> None:
    """Raises ``Divergence`` where another operation is recorded."""
    record = entry.record
    assert record is not None
    fields = msgspec.to_builtins(request)
    differ = ["verb"] if record.verb != verb else _differences(record, request, fields)
    if not differ:
        return
    raise _diverged(record, shown(verb, fields), differ)


def _said(entry: Entry | None, about: str) -> bytes | None:
    """The answer that is kept at a place. Raises ``Divergence`` where another question is,
    or no question."""
    record = entry.record if entry is not None else None
    if record is None:
        return None
    if record.verb != "note" or (record.request or {}).get("about", about) != about:
        differ = "verb" if record.verb != "note" else "question"
        raise _diverged(record, shown("note", {"about": about}), [differ])
    return _asking.answer_of(entry)


def _diverged(record: TrajectoryRecord, asked: str, differ: list[str]) -> Divergence:
    recorded = shown(record.verb, record.request)
    return Divergence(
        f"{record.lane} step {record.step} was recorded as {recorded!r}, asked for is {asked!r}: "
        f"they differ in {', '.join(differ)}",
        lane=record.lane or "", step=record.step or 0, recorded=recorded, asked=asked,
    )  # fmt: skip


def _differences(record: TrajectoryRecord, request: Any, fields: dict[str, Any]) -> list[str]:
    if record.request is None:  # too large to be kept: its size is
        return [] if len(encode(request)) == record.cut else ["size"]
    before, now = _essence(record.request), _essence(fields)
    return sorted(name for name in before | now if before.get(name) != now.get(name))


def _essence(request: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in request.items() if key not in INCIDENTAL}


def _is_partial(reply: Any) -> bool:
    """Whether content that was read is not in the log."""
    if not isinstance(reply, FileReply) or reply.error is not None:
        return False
    content = (reply.data, reply.entries, reply.entry)
    return reply.size > 0 and all(part is None for part in content)
