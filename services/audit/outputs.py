"""Outputs that are too long for their records, in pieces.

Owns: the table of pieces. Does not own: records, and how long both are kept
(:mod:`services.audit.trajectory`): pieces count among the bytes of the hour in which they
came, and go with it.

A piece is of the node that told it, as the bus knows that node.
"""

from __future__ import annotations

import time

from sqlalchemy import text

from schemas.base import Ok
from schemas.trajectory import OutputPage, OutputPiece, OutputQuery
from services.audit.trajectory import COUNT, HOUR_S
from shared.bus import Incoming
from shared.db import Database
from shared.errors import InvalidRequest, NotFound

ROW_BYTES = 100
"""Of a piece, beside its data."""
_PUT = text(
    "insert into trajectory_output (node, uid, seq, stream, piece, project, hour, data) "
    "values (:node, :uid, :seq, :stream, :piece, :project, :hour, :data) "
    "on conflict do nothing"
)
_GET = text(
    "select data from trajectory_output where node = :node and uid = :uid and seq = :seq "
    "and stream = :stream and piece = :piece and project = :project"
)


class Outputs:
    """Takes pieces from nodes and hands them to readers."""

    def __init__(self, db: Database) -> None:
        self._db = db

    async def take(self, piece: OutputPiece, incoming: Incoming) -> Ok:
        """Answers ``dsec.rpc.v1.audit.output.<node>``. A repeated piece is harmless."""
        hour = int(time.time() // HOUR_S)
        values = {
            "node": incoming.subject.rpartition(".")[2], "uid": piece.uid, "seq": piece.seq,
            "stream": piece.stream, "piece": piece.piece, "project": piece.project,
            "hour": hour, "data": piece.data,
        }  # fmt: skip
        async with self._db.transaction() as connection:
            if (await connection.execute(_PUT, values)).rowcount:
                size = len(piece.data) + ROW_BYTES
                await connection.execute(COUNT, {"hour": hour, "bytes": size})
        return Ok()

    async def page(self, query: OutputQuery, _: Incoming) -> OutputPage:
        """Answers ``audit.outputs``. The asker says which project may be seen. Raises
        ``NotFound`` where the piece did not come (yet), or is no longer kept."""
        if query.project is None:
            raise InvalidRequest("an output's project must be named", field="project")
        values = {
            "node": query.node, "uid": query.uid, "seq": query.seq, "stream": query.stream,
            "piece": query.piece, "project": query.project,
        }  # fmt: skip
        async with self._db.transaction() as connection:
            data = (await connection.execute(_GET, values)).scalar_one_or_none()
        if data is None:
            raise NotFound(f"no piece {query.piece} of this output is kept", field="piece")
        return OutputPage(data=bytes(data))
