"""Reading a sandbox's trajectory log, wherever it is.

Owns: that the records come in order, each once, from its node while that answers and from
the services for what the node does not have; gaps. Does not own: what a record means to a
user (:mod:`libdsec.trajectory`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec

from libdsec import _ids
from libdsec._core import TERMINAL
from libdsec._held import Held
from libdsec._wire import (
    OUTPUT_PIECE_BYTES,
    TRAJECTORY_PAGE,
    ExecReply,
    OutputPage,
    OutputQuery,
    TrajectoryPage,
    TrajectoryQuery,
    TrajectoryRecord,
    TrajectoryRequest,
    WholeOutput,
)
from libdsec.errors import (
    Forbidden,
    InternalError,
    NotFound,
    SandboxDied,
    Unavailable,
    from_wire,
)

LATE_MIN_S, LATE_MAX_S = 0.25, 4.0
"""Waits for what a node has not told yet of a sandbox that is over; each twice the last."""
NODE_S = 10.0
"""A node that does not say what it has for so long is not waited for: the services are
asked."""
ARRIVES_S, LOOK_S = 60.0, 0.2
"""How long a long output may be on its way to the services."""
STREAMS = ("stdout", "stderr")
NOT_BEGUN = ("unavailable", "capacity_exhausted")
"""Errors of operations that did not begin."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record, or ``missing`` numbers from ``seq`` on without one. ``held``: its node has
    it, and knows the operation if it is asked for again."""

    seq: int
    record: TrajectoryRecord | None = None
    held: bool = False
    missing: int = 0


async def entries(sandbox: Held) -> AsyncIterator[Entry]:
    """All there is, oldest first. Raises ``Forbidden``, ``Unavailable``."""
    seen = 0
    page = await _node_page(sandbox, 0)
    if page is None or _begins(page) > 1:
        end = None if page is None else _begins(page)
        async for record in _of_services(sandbox):
            if end is not None and record.seq >= end:
                break
            for entry in _next(seen, record, held=False):
                yield entry
            seen = record.seq
    while page is not None:
        for record in page.records:
            for entry in _next(seen, record, held=True):
                yield entry
            seen = record.seq
        if not page.more:
            if page.last > seen:
                yield Entry(seen + 1, missing=page.last - seen)
            return
        page = await _node_page(sandbox, seen)
        if page is None:
            raise Unavailable("the sandbox's node stopped answering", retryable=True)


def _begins(page: TrajectoryPage) -> int:
    return page.records[0].seq if page.records else page.last + 1


def _next(seen: int, record: TrajectoryRecord, *, held: bool) -> list[Entry]:
    found = [Entry(record.seq, record, held)]
    if record.seq > seen + 1:
        found.insert(0, Entry(seen + 1, missing=record.seq - seen - 1))
    return found


async def _node_page(sandbox: Held, after: int) -> TrajectoryPage | None:
    """What the sandbox's node has, ``None`` where there is nobody to ask."""
    if sandbox.state in TERMINAL:
        return None
    try:
        async with asyncio.timeout(NODE_S):
            request = TrajectoryRequest(op_id=_ids.new(), after=after)
            operation = await sandbox._start("trajectory", request, TrajectoryPage)
            try:
                page = await operation.final()
            finally:
                operation.abandon()
        if page.error is not None:
            raise from_wire(page.error)
        return page
    except Forbidden:
        raise
    except (NotFound, SandboxDied, Unavailable, TimeoutError):
        return None


async def _of_services(sandbox: Held) -> AsyncIterator[TrajectoryRecord]:
    if sandbox._node is None:
        dead = await sandbox._verdict()  # where it is, too
        if isinstance(dead, NotFound):
            raise dead
    if sandbox._node is None:
        return  # it never had a node
    calls = sandbox._core.calls
    subject = calls.get_subject(sandbox.project, "sandbox", "trajectory")
    after = 0
    while True:
        query = TrajectoryQuery(
            uid=sandbox.uid, node=sandbox._node, after=after, limit=TRAJECTORY_PAGE
        )
        page = await calls.read(subject, query, TrajectoryPage)
        for record in page.records:
            yield record
        if not page.more:
            return
        after = page.records[-1].seq


async def completed(sandbox: Held, seq: int, reply: ExecReply) -> ExecReply:
    """The reply in record ``seq`` with all of its long outputs, where the services have them;
    what they do not have stays head and tail. Raises ``Unavailable``, ``Forbidden``."""
    for whole in reply.whole:
        at = STREAMS.index(whole.stream)
        try:
            data = await _whole(sandbox, seq, whole)
        except NotFound:
            continue
        dropped = list(reply.truncated)
        dropped[at] = max(0, dropped[at] - (len(data) - len(getattr(reply, whole.stream))))
        reply = msgspec.structs.replace(
            reply, **{whole.stream: data}, truncated=(dropped[0], dropped[1])
        )
    return reply


async def _whole(sandbox: Held, seq: int, whole: WholeOutput) -> bytes:
    """What was told of it. Its node may be about to tell."""
    found = bytearray()
    end = time.monotonic() + ARRIVES_S
    subject = sandbox._core.calls.get_subject(sandbox.project, "sandbox", "output")
    while len(found) < whole.bytes:
        query = OutputQuery(
            uid=sandbox.uid, node=sandbox._node or "", seq=seq, stream=whole.stream,
            piece=len(found) // OUTPUT_PIECE_BYTES,
        )  # fmt: skip
        try:
            found += (await sandbox._core.calls.read(subject, query, OutputPage)).data
        except NotFound:
            if sandbox.state in TERMINAL or time.monotonic() >= end:
                raise
            await asyncio.sleep(LOOK_S)
    if hashlib.sha256(found).hexdigest() != whole.sha256:
        raise InternalError(f"record {seq}: its {whole.stream} is not what its node recorded")
    return bytes(found)


def did_not_begin(record: TrajectoryRecord) -> bool:
    """Whether the operation was refused before it began."""
    error = (record.reply or {}).get("error") or {}
    return error.get("code") in NOT_BEGUN


class Log:
    """The records of places in scripts, by lane and step and by operation. Read once, when
    it is first asked."""

    def __init__(self, sandbox: Held) -> None:
        self._sandbox = sandbox
        self._places: dict[tuple[str, int], Entry] = {}
        self._operations: dict[str, Entry] = {}
        self._read = False
        self._late = False  # what is not there by now does not come
        self._reading = asyncio.Lock()

    async def read(self) -> None:
        """Reads it, unless that was done. Raises as :func:`entries`."""
        if self._read:
            return
        async with self._reading:
            if self._read:
                return
            async for entry in entries(self._sandbox):
                record = entry.record
                if record is None or record.lane is None or did_not_begin(record):
                    continue
                self._operations[record.op_id] = entry
                if record.step is not None:
                    self._places[record.lane, record.step] = entry
            self._read = True

    async def again(self) -> None:
        """Reads it once more."""
        self._read = False
        await self.read()

    async def settled(self, lane: str, step: int) -> None:
        """Of a sandbox that is over, its node may still be telling the services what was done
        last: a place without an end is looked for again, for a while."""
        wait_s = LATE_MIN_S
        while not self._late and not self._ended(lane, step):
            await asyncio.sleep(wait_s)
            await self.again()
            wait_s *= 2
            self._late = wait_s > LATE_MAX_S

    def _ended(self, lane: str, step: int) -> bool:
        entry = self.at(lane, step)
        return entry is not None and entry.record is not None and entry.record.ended_at is not None

    def at(self, lane: str, step: int) -> Entry | None:
        """What is recorded at a place."""
        return self._places.get((lane, step))

    def operation(self, op_id: str) -> Entry | None:
        """What is recorded of an operation."""
        return self._operations.get(op_id)

    def count(self, lane: str) -> int:
        """How many places of a lane have a record."""
        return sum(1 for name, _ in self._places if name == lane)
