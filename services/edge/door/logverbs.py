"""Verbs at the door that are about the trajectory log itself.

Owns: which they are, what a note is answered. Does not own: the log (:mod:`trail`).
"""

from __future__ import annotations

from schemas.trajectory import (
    NoteReply,
    NoteRequest,
    TrajectoryPage,
    TrajectoryRequest,
)
from services.edge.door.operation import Operation
from services.edge.door.verbs import Verb, always
from services.edge.journal.trail import Trail
from services.edge.sandbox.actor import Sandbox
from shared.errors import Unsupported


def of(trail: Trail) -> dict[str, Verb]:
    """The verbs ``trajectory`` and ``note``."""

    async def note(sandbox: Sandbox, request: NoteRequest, op: Operation) -> NoteReply:
        """Its intent is all there is of it: it is answered once the journal has that."""
        if op.logged.record is None:
            raise Unsupported("this node keeps no trajectory log", field="data")
        await trail.kept(op)
        return NoteReply(op_id=op.op_id, seq=op.logged.seq)

    async def again(sandbox: Sandbox, request: NoteRequest, op: Operation) -> NoteReply:
        """An earlier process had not answered it."""
        op.resumed = op.claimed = True
        return await note(sandbox, request, op)

    return {
        "trajectory": Verb(
            TrajectoryRequest, TrajectoryPage, trail.page, wakes=False, aside=True
        ),
        "note": Verb(
            NoteRequest, NoteReply, note, always, always, wakes=False, aside=True, resume=again
        ),
    }  # fmt: skip
