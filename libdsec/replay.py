"""Doing again in a fresh sandbox what was done in another one.

Owns: the order, what can't be done again, differences. Does not own: records
(:mod:`libdsec.trajectory`).

The order is the recorded one: an operation begins when all those have ended that had ended
before it began. So commands that ran one after the other do so again, and those that
overlapped may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from libdsec import _ids
from libdsec._wire import ExecReply, ExecRequest, FileReply, FileRequest
from libdsec.errors import DSecError, from_wire
from libdsec.process import collect
from libdsec.results import ExecResult
from libdsec.trajectory import TrajectoryRecord

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

LOOKS = frozenset({"file_read", "file_stat", "file_list", "file_pack", "note"})
"""What changes nothing in a sandbox."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``what`` differs between the recorded operation and its repetition: ``exit_code``,
    ``stdout``, ``stderr``, ``timed_out``, ``error``; or ``not_replayed``, with the reason in
    ``now``."""

    record: TrajectoryRecord
    what: str
    recorded: Any = None
    now: Any = None


@dataclass(slots=True)
class Replay:
    """``replayed`` operations were done again, with these ``differences``."""

    replayed: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether everything could be done again and came out the same."""
        return not self.differences


async def replay(records: Sequence[TrajectoryRecord], into: Sandbox) -> Replay:
    """Does it all again, in ``into``. Never raises for what an operation did."""
    outcome = Replay()
    ended: dict[int, asyncio.Task[None]] = {}
    done = [r for r in records if not (r.state == "refused" or r.verb in LOOKS)]
    async with asyncio.TaskGroup() as group:
        for record in done:
            before = [
                ended[r.seq]
                for r in done
                if r.seq in ended and r.ended_at is not None and r.ended_at <= _began(record)
            ]
            ended[record.seq] = group.create_task(_in_turn(record, before, into, outcome))
            await asyncio.sleep(0)
    outcome.differences.sort(key=lambda d: d.record.seq)
    return outcome


def _began(record: TrajectoryRecord) -> float:
    """``at`` is a tick of the clock that stamps files: within one, it cannot tell what
    followed from what overlapped."""
    return record.at if record.begun_at is None else record.begun_at


async def _in_turn(
    record: TrajectoryRecord, before: Sequence[asyncio.Task[None]], into: Sandbox,
    outcome: Replay,
) -> None:  # fmt: skip
    for task in before:
        await asyncio.wait([task])
    reason = _not_replayable(record)
    if reason is not None:
        outcome.differences.append(Difference(record, "not_replayed", now=reason))
        return
    outcome.replayed += 1
    try:
        result = await _again(record, into)
    except DSecError as exc:
        if type(exc) is not type(record.error):
            outcome.differences.append(Difference(record, "error", record.error, exc))
        return
    if record.error is not None:
        outcome.differences.append(Difference(record, "error", record.error, None))
    elif result is not None and record.result is not None:
        outcome.differences += _compared(record, record.result, result)


def _not_replayable(record: TrajectoryRecord) -> str | None:
    """Why it can't be done again."""
    if record.state == "lost":
        return f"{record.missing} operations have no record"
    if record.state == "open":
        return "nobody knows how it ended"
    if record.request is None:
        return "its request was too large to be kept"
    if record.request.get("stdin") or record.request.get("pty"):
        return "its input is not recorded"
    if record.verb in ("file_write", "file_unpack") and record.request.get("data") is None:
        return "its content is not recorded"
    return None


async def _again(record: TrajectoryRecord, into: Sandbox) -> ExecResult | None:
    fields = {k: v for k, v in (record.request or {}).items() if k not in ("lane", "step")}
    fields["op_id"] = _ids.new()
    if record.verb == "exec":
        request = msgspec.convert(fields, ExecRequest)
        operation = await into._start("exec", request, ExecReply)
        return await collect(operation)
    given = msgspec.convert(fields, FileRequest)
    filing = await into._start(record.verb, given, FileReply)
    try:
        reply = await filing.final()
    finally:
        filing.abandon()
    if reply.error is not None:
        raise from_wire(reply.error)
    return None


def _compared(
    record: TrajectoryRecord, before: ExecResult, now: ExecResult
) -> list[Difference]:
    found = [
        Difference(record, name, getattr(before, name), getattr(now, name))
        for name in ("exit_code", "timed_out")
        if getattr(before, name) != getattr(now, name)
    ]
    for name, dropped in (("stdout", before.truncated[0]), ("stderr", before.truncated[1])):
        old, new = getattr(before, name), getattr(now, name)
        # of what is not kept only the beginning can be compared
        size = len(old) // 2 if dropped else None
        if old[:size] != new[:size]:
            found.append(Difference(record, name, old, new))
    return found
