"""What the scheduler's two durables carry, batch by batch.

Owns: decoding, grouping by kind, one span a batch. Does not own: the work
(``creates``, ``ops``) or the rules (``decide``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from schemas.base import BadMessage, decode
from schemas.node import NodeCommand
from schemas.sandbox import (
    CreateCommand,
    EdgeObservations,
    Observation,
    OpCommand,
    SandboxCreate,
    SandboxOp,
)  # fmt: skip
from services.scheduler import decide, store
from services.scheduler.creates import Creates
from services.scheduler.ops import Ops
from services.scheduler.work import Work
from shared import telemetry
from shared.consumer import Received

MAX_OBSERVATIONS = 4096
"""Observations of one transaction."""


class Handlers:
    """The handlers of ``scheduler_commands`` and ``scheduler_observations``."""

    def __init__(self, work: Work, creates: Creates, ops: Ops) -> None:
        self._work = work
        self._creates = creates
        self._ops = ops

    async def commands(self, batch: Sequence[Received]) -> None:
        """Creates first, then operations: a stop finds what came before it."""
        creates: list[CreateCommand] = []
        ops: list[OpCommand] = []
        node_ops: list[tuple[NodeCommand, str | None]] = []
        for message in batch:
            kind = message.subject.split(".")[3:5]
            if kind == ["sandbox", "create"]:
                creates += decode(message.data, SandboxCreate).commands
            elif kind == ["sandbox", "op"]:
                ops += decode(message.data, SandboxOp).commands
            elif kind == ["node", "op"]:
                node_ops.append((decode(message.data, NodeCommand), message.reply_to))
            else:
                raise BadMessage(f"nothing is done on {message.subject}")
        parents = [c.trace for c in creates] + [c.trace for c in ops]
        with telemetry.span("scheduler commands", parents=parents):
            await self._creates.handle(creates)
            await self._ops.handle(ops)
            for command, reply_to in node_ops:
                await self._ops.handle_node(command, reply_to)

    async def observations(self, batch: Sequence[Received]) -> None:
        """Applies what edges saw, in the order they saw it."""
        found: list[tuple[str, Observation]] = []
        for message in batch:
            report = decode(message.data, EdgeObservations)
            node = message.subject.rpartition(".")[2]
            if report.node != node:
                raise BadMessage(f"{node} reports for {report.node}", field="node")
            found += [(node, o) for o in report.observations]
        with telemetry.span("scheduler observations", parents=[m.trace for m in batch]):
            for i in range(0, len(found), MAX_OBSERVATIONS):
                await self._observe(found[i : i + MAX_OBSERVATIONS])

    async def _observe(self, found: Sequence[tuple[str, Observation]]) -> None:
        async with self._work.unit() as unit:
            changes = unit.changes
            changes.load(await store.lock(unit.connection, {o.uid for _, o in found}))
            now = time.time()
            for node, seen in found:
                decide.observed(changes, node, seen, now=now, deadlines=self._work.deadlines)
