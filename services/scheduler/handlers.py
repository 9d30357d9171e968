"""What the scheduler's two durables carry, batch by batch.

Owns: decoding, grouping by kind, one span a batch. Does not own: the work
(``creates``, ``ops``) or the rules (``decide``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence

from schemas.base import BadMessage, decode
from schemas.job import JobCommand
from schemas.node import NodeCommand
from schemas.sandbox import EdgeObservations, Observation, SandboxCreate, SandboxOp
from services.scheduler import decide, store
from services.scheduler.creates import Creates
from services.scheduler.jobs import Jobs
from services.scheduler.ops import Ops
from services.scheduler.work import Work
from shared import telemetry
from shared.consumer import Received

MAX_OBSERVATIONS = 4096
"""Observations of one transaction."""


class Handlers:
    """The handlers of ``scheduler_commands`` and ``scheduler_observations``."""

    def __init__(self, work: Work, creates: Creates, ops: Ops, jobs: Jobs) -> None:
        self._work = work
        self._creates = creates
        self._ops = ops
        self._jobs = jobs
        self._kinds: dict[str, Callable[[Sequence[Received]], Awaitable[None]]] = {
            "sandbox.create": self._create,
            "sandbox.op": self._operate,
            "job": self._lease,
            "node": self._administer,
        }

    async def commands(self, batch: Sequence[Received]) -> None:
        """In their order, neighbours of a kind together: a stop finds what came before
        it and leaves alone what came after."""
        for kind, group in itertools.groupby(batch, _kind):
            await self._kinds[kind](list(group))

    async def _create(self, batch: Sequence[Received]) -> None:
        commands = [c for m in batch for c in decode(m.data, SandboxCreate).commands]
        with telemetry.span("scheduler creates", parents=[c.trace for c in commands]):
            await self._creates.handle(commands)

    async def _operate(self, batch: Sequence[Received]) -> None:
        commands = [c for m in batch for c in decode(m.data, SandboxOp).commands]
        with telemetry.span("scheduler operations", parents=[c.trace for c in commands]):
            await self._ops.handle(commands)

    async def _lease(self, batch: Sequence[Received]) -> None:
        await self._jobs.handle([decode(m.data, JobCommand) for m in batch])

    async def _administer(self, batch: Sequence[Received]) -> None:
        for message in batch:
            command = decode(message.data, NodeCommand)
            await self._ops.handle_node(command, message.reply_to)

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


def _kind(message: Received) -> str:
    """What a command is about. Raises ``BadMessage`` for what nothing is done on."""
    entity, verb = message.subject.split(".")[3:5]
    if entity in ("job", "node"):
        return entity
    if entity == "sandbox" and verb in ("create", "op"):
        return f"{entity}.{verb}"
    raise BadMessage(f"nothing is done on {message.subject}")
