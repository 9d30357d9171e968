"""Creates: admitted requests → placed (or rejected) sandboxes, in one transaction.

Owns: how a command becomes rows and what a repeated one is answered. Does not own:
placement and writing (``work``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence

from schemas.base import WireError, encode
from schemas.sandbox import CreateCommand, CreateItem, ResolvedSpec, SandboxSpec
from services.scheduler import decide, sending, store
from services.scheduler.images import Answer
from services.scheduler.model import Sandbox
from services.scheduler.placement import amounts
from services.scheduler.sending import SpecKey
from services.scheduler.work import Unit, Work
from shared.lifecycle import REQUESTED

MAX_ITEMS = 4096
"""Sandboxes of one transaction; a larger batch becomes several."""

Item = tuple[CreateCommand, CreateItem]


class Creates:
    """Handles ``SandboxCreate`` commands."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def handle(self, commands: Sequence[CreateCommand]) -> None:
        """Creates what is new, answers what is not. Safe to repeat at any point."""
        items = ((command, item) for command in commands for item in command.items)
        for portion in _portions(items, MAX_ITEMS):
            await self._handle(portion)

    async def _handle(self, items: Sequence[Item]) -> None:
        answers = await self._resolve(items)
        async with self._work.unit() as unit:
            await store.put_requests(unit.connection, [c for c, _ in items])
            existing = {
                r.uid: r for r in await store.find(unit.connection, [i.uid for _, i in items])
            }
            new = [(c, i) for c, i in items if i.uid not in existing]
            await self._put_specs(unit, new, answers)
            now = time.time()
            for command, item in new:
                if item.uid not in unit.changes.rows:
                    self._create(unit, command, item, answers, now)
            again = await self._repeated(unit, items, existing, now)
            unit.replies += sending.create_replies(again)

    async def _resolve(self, items: Sequence[Item]) -> dict[SpecKey, Answer]:
        wanted: dict[SpecKey, tuple[SandboxSpec, list[str]]] = {}
        for command, item in items:
            if item.refused is None and 0 <= item.spec < len(command.specs):
                key = (command.request_id, item.spec)
                if key not in wanted:
                    projects = command.projects or [command.project]
                    wanted[key] = (command.specs[item.spec], projects)
        return await self._work.images.resolve(wanted) if wanted else {}

    async def _put_specs(
        self, unit: Unit, items: Sequence[Item], answers: dict[SpecKey, Answer]
    ) -> None:
        bodies: dict[SpecKey, tuple[bytes, bool]] = {}
        for command, item in items:
            key = (command.request_id, item.spec)
            if key in bodies or not 0 <= item.spec < len(command.specs):
                continue
            spec = command.specs[item.spec]
            body, _ = answers.get(key, (None, None))
            bodies[key] = (body or encode(ResolvedSpec(spec=spec)), body is not None)
            if body is not None:
                unit.bodies[key], unit.specs[key] = body, spec
        await store.put_specs(unit.connection, bodies)

    def _create(
        self, unit: Unit, command: CreateCommand, item: CreateItem,
        answers: dict[SpecKey, Answer], now: float,
    ) -> None:  # fmt: skip
        row = self._row(command, item, now)
        changes = unit.changes
        changes.rows[row.uid] = row
        unit.new.add(row.uid)
        body, error = answers.get((command.request_id, item.spec), (None, None))
        refused = item.refused or error or _without_spec(command, item)
        if refused is not None:
            decide.reject(changes, row, refused, at=now)
        elif now >= row.expires_at:
            decide.expire(changes, row, at=now)
        elif body is None:
            decide.later(changes, row, at=now + self._work.settings.reconcile_s)
        else:
            changes.place.append(row.uid)

    def _row(self, command: CreateCommand, item: CreateItem, now: float) -> Sandbox:
        settings = self._work.settings
        known = 0 <= item.spec < len(command.specs)
        spec = command.specs[item.spec] if known else SandboxSpec()
        cores, memory_mb = amounts(
            spec,
            default_cores=settings.default_cores,
            default_memory_mb=settings.default_memory_mb,
        )
        return Sandbox(
            uid=item.uid, project=command.project, state=REQUESTED, generation=0,
            placed_generation=0, index=item.index, spec_idx=item.spec,
            principal=command.principal, backend=spec.backend, cores=cores,
            memory_mb=memory_mb, expires_at=command.expires_at, created_at=now,
            changed_at=now, request_id=command.request_id, job=spec.job, labels=spec.labels,
            reply_to=command.reply_to, total=command.total, trace=command.trace,
        )  # fmt: skip

    async def _repeated(
        self, unit: Unit, items: Sequence[Item], existing: dict[str, Sandbox], now: float
    ) -> list[Sandbox]:
        """The present state of sandboxes that exist already, to be answered. One
        whose stop came first is completed, and its end announced."""
        out, adopted = [], []
        for command, item in items:
            row = existing.get(item.uid)
            if row is None:
                continue
            if row.project != command.project:
                out.append(_taken(self._row(command, item, now)))
            elif row.request_id is None:
                stopped = decide.adopt(unit.changes, row, self._row(command, item, now))
                adopted.append(stopped)
                out.append(stopped)
            else:
                out.append(decide.with_reply(row, command))
        await store.adopt(unit.connection, adopted)
        return out


def _without_spec(command: CreateCommand, item: CreateItem) -> WireError | None:
    if 0 <= item.spec < len(command.specs):
        return None
    return WireError(code="internal", message="the item has no spec", is_infra=True)


def _taken(row: Sandbox) -> Sandbox:
    error = WireError(
        code="conflict", message=f"{row.uid} is a sandbox of another project",
        field="request_id",
    )  # fmt: skip
    return decide.only_reply(row, error)


def _portions(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    source = iter(items)
    while portion := list(itertools.islice(source, size)):
        yield portion
