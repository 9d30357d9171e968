"""Operations of clients and operators: stop, pause, resume, set_timeout; node states.

Owns: from a selection to rows, the wait until every named sandbox has settled. Does
not own: what an operation means in a state (``operating``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from schemas.base import ErrorReply, Ok, encode
from schemas.node import NodeCommand
from schemas.sandbox import ItemResult, OpCommand
from services.scheduler import jobstore, leases, nodes, operating, requests, sending, store
from services.scheduler.work import Unit, Work
from shared.bus import Outgoing
from shared.db import Database
from shared.errors import InvalidRequest, NotFound
from shared.lifecycle import TRANSITIONAL
from shared.wire import to_wire

MAX_SELECTED = 65_536
"""Sandboxes of one operation: twice the largest create."""
_ADMIN = {"cordon": "cordoned", "uncordon": "ready", "drain": "draining"}


class Ops:
    """Handles ``SandboxOp`` and ``NodeCommand``."""

    def __init__(self, work: Work, db: Database) -> None:
        self._work = work
        self._db = db

    async def handle(self, commands: Sequence[OpCommand]) -> None:
        """Applies a batch of operations, in order, in one transaction."""
        if not commands:
            return
        async with self._work.unit() as unit:
            await self._note_stops(unit, commands)
            found = [(c, await self._select(unit, c)) for c in commands]
            unit.replies += [_too_many(c) for c, u in found if len(u) > MAX_SELECTED and c.reply_to]
            commands = [c for c, u in found if len(u) <= MAX_SELECTED]
            selected = [u for _, u in found if len(u) <= MAX_SELECTED]
            rows = await store.lock(unit.connection, [u for s in selected for u in s])
            unit.changes.load(rows)
            await self._remember_unknown(unit, commands, selected)
            now = time.time()
            for command, uids in zip(commands, selected, strict=True):
                await self._apply(unit, command, uids, now)

    async def _note_stops(self, unit: Unit, commands: Sequence[OpCommand]) -> None:
        """Stops of whole jobs also end what was asked for before and is still under way."""
        stops = [
            c for c in commands
            if c.verb == "stop" and c.request.job is not None and not c.request.labels
        ]  # fmt: skip
        keys = {(c.project, c.request.job or "") for c in stops}
        jobs = await jobstore.lock(unit.connection, keys)
        now = time.time()
        for command in stops:
            key = (command.project, command.request.job or "")
            jobs[key] = leases.stopped(jobs[key], asked_at=command.asked_at or now, at=now)
        await jobstore.save(unit.connection, jobs.values())

    async def _select(self, unit: Unit, command: OpCommand) -> list[str]:
        request = command.request
        uids = list(dict.fromkeys(request.uids))
        if request.job is not None or request.labels:
            uids += await store.select_live(
                unit.connection, command.project,
                job=request.job, labels=request.labels, asked_at=command.asked_at or None,
                limit=MAX_SELECTED + 1,
            )  # fmt: skip
        return list(dict.fromkeys(uids))

    async def _remember_unknown(
        self, unit: Unit, commands: Sequence[OpCommand], selected: Sequence[list[str]]
    ) -> None:
        unknown = [
            (uid, command.project, command.principal)
            for command, uids in zip(commands, selected, strict=True)
            if command.verb == "stop"
            for uid in uids
            if uid not in unit.changes.rows
        ]
        if unknown:
            await store.put_tombstones(unit.connection, unknown)

    async def _apply(self, unit: Unit, command: OpCommand, uids: list[str], now: float) -> None:
        request, deadlines = command.request, self._work.deadlines
        settled: list[ItemResult] = []
        for uid in uids:
            result = operating.operate(unit.changes, uid, command, at=now, deadlines=deadlines)
            if result is not None:
                settled.append(result)
        rows = unit.changes.rows
        waiting = sum(
            1 for u in uids
            if u in rows and rows[u].op_id == request.request_id
            and rows[u].state in TRANSITIONAL
        )  # fmt: skip
        if waiting:
            await requests.put_op(
                unit.connection, request.request_id, command.reply_to,
                uids=uids, settled=settled, remaining=waiting,
            )  # fmt: skip
        elif command.reply_to:
            results = await self._work.results(unit, uids, settled)
            unit.replies += sending.op_replies(command.reply_to, request.request_id, results)

    async def handle_node(self, command: NodeCommand, reply_to: str | None) -> None:
        """Sets what the operator wants of a node. A draining node gets no new
        sandboxes; the reconciler stops those it has with cause ``node_lost``: to a
        trainer their end is the infrastructure's doing, and is masked."""
        async with self._db.transaction() as connection:
            found = await nodes.set_admin(connection, command.node, _ADMIN[command.verb])
        answer: Ok | ErrorReply = Ok()
        if not found:
            error = NotFound(f"no node {command.node}", field="node")
            answer = ErrorReply(error=to_wire(error), request_id=command.request_id)
        if reply_to:
            await self._work.reply([Outgoing(reply_to, encode(answer))])


def _too_many(command: OpCommand) -> Outgoing:
    """The answer where one transaction cannot hold it: nothing is done to a part of it."""
    text = f"more than {MAX_SELECTED} sandboxes: name a part of them, by labels or ids"
    error = InvalidRequest(text, field="job" if command.request.job else "labels")
    reply = ErrorReply(error=to_wire(error), request_id=command.request.request_id)
    return Outgoing(command.reply_to or "", encode(reply))
