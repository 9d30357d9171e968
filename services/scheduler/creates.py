"""Creates: admitted requests → placed (or rejected) sandboxes, in one transaction.

Owns: how a command becomes rows and what a repeated one is answered. Does not own:
placement and writing (``work``).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from schemas.base import WireError, encode
from schemas.sandbox import CreateCommand, CreateItem, ResolvedSpec, SandboxSpec
from services.scheduler import branching, decide, jobstore, leases, requests, sending, store
from services.scheduler.images import Answer
from services.scheduler.leases import Job
from services.scheduler.model import Sandbox, event_of
from services.scheduler.placement import amounts
from services.scheduler.sending import SpecKey
from services.scheduler.work import Unit, Work
from shared.lifecycle import REQUESTED

MAX_ITEMS = 4096
"""Sandboxes of one transaction; a larger batch becomes several."""

Answers = Mapping[SpecKey, Answer]


class Item(NamedTuple):
    """One sandbox of a command. ``key`` names its spec within the whole request: by
    the first item that has it, because a request may come in several commands, each
    with its own numbering. ``spec`` is ``None`` where auth refused the item."""

    command: CreateCommand
    item: CreateItem
    key: SpecKey
    spec: SandboxSpec | None

    @property
    def uid(self) -> str:
        return self.item.uid

    @property
    def job(self) -> tuple[str, str] | None:
        """Project and name of the job it is to belong to."""
        name = self.spec.job if self.spec is not None else None
        return (self.command.project, name) if name else None


def items_of(command: CreateCommand) -> Iterator[Item]:
    """The items of a command with their specs."""
    first: dict[int, int] = {}
    for item in command.items:
        if 0 <= item.spec < len(command.specs):
            key = (command.request_id, first.setdefault(item.spec, item.index))
            yield Item(command, item, key, command.specs[item.spec])
        else:
            yield Item(command, item, (command.request_id, -1), None)


class Creates:
    """Handles ``SandboxCreate`` commands."""

    def __init__(self, work: Work) -> None:
        self._work = work

    async def handle(self, commands: Sequence[CreateCommand]) -> None:
        """Creates what is new, answers what is not. Safe to repeat at any point."""
        items = (item for command in commands for item in items_of(command))
        for portion in _portions(items, MAX_ITEMS):
            await self._handle(portion)

    async def _handle(self, items: Sequence[Item]) -> None:
        answers = await self._resolve(items)
        async with self._work.unit() as unit:
            existing = {r.uid: r for r in await store.find(unit.connection, [i.uid for i in items])}
            new = [i for i in items if i.uid not in existing]
            answers = {**answers, **await branching.answers(unit.connection, new)}
            specs = self._specs(unit, new, answers)
            await requests.put_requests(unit.connection, [i.command for i in items], specs)
            jobs = await jobstore.share(unit.connection, {k for i in new if (k := i.job)})
            now = time.time()
            for item in new:
                if item.uid not in unit.changes.rows:  # twice in one batch
                    stopped = _stopped(item, jobs.get(item.job) if item.job else None)
                    self._create(unit, item, answers, now, stopped)
            again = await self._repeated(unit, items, existing, now)
            unit.replies += sending.create_replies(again)

    async def _resolve(self, items: Sequence[Item]) -> Answers:
        wanted = {
            i.key: (i.spec, i.command.projects or [i.command.project])
            for i in items
            if i.spec is not None and i.spec.source is None and i.item.refused is None
        }
        return await self._work.images.resolve(wanted) if wanted else {}

    def _specs(self, unit: Unit, items: Sequence[Item], answers: Answers) -> requests.Specs:
        """What is to be stored of them; ``unit`` knows them from here on."""
        bodies: dict[SpecKey, tuple[bytes, bool]] = {}
        for item in items:
            if item.key in bodies or item.spec is None:
                continue
            body, _ = answers.get(item.key, (None, None))
            bodies[item.key] = (body or encode(ResolvedSpec(spec=item.spec)), body is not None)
            if body is not None:
                unit.bodies[item.key] = body
                unit.specs[item.key] = branching.placed(item.spec, body)
        return bodies

    def _create(
        self, unit: Unit, item: Item, answers: Answers, now: float, stopped: WireError | None
    ) -> None:
        row = self._row(item, now)
        changes = unit.changes
        changes.rows[row.uid] = row
        unit.new.add(row.uid)
        body, error = answers.get(item.key, (None, None))
        refused = item.item.refused or stopped or error or _without_spec(item)
        if refused is not None:
            decide.reject(changes, row, refused, at=now)
        elif now >= row.expires_at:
            decide.expire(changes, row, at=now)
        elif body is None:
            decide.later(changes, row, at=now + self._work.settings.reconcile_s)
        else:
            changes.place.append(row.uid)

    def _row(self, item: Item, now: float) -> Sandbox:
        settings, command = self._work.settings, item.command
        spec = item.spec or SandboxSpec()
        cores, memory_mb = amounts(
            spec,
            default_cores=settings.default_cores,
            default_memory_mb=settings.default_memory_mb,
        )
        return Sandbox(
            uid=item.uid, project=command.project, state=REQUESTED, generation=0,
            placed_generation=0, index=item.item.index, spec_idx=item.key[1],
            principal=command.principal, backend=spec.backend, cores=cores,
            memory_mb=memory_mb, expires_at=command.expires_at, created_at=now,
            changed_at=now, request_id=command.request_id, job=spec.job, labels=spec.labels,
            reply_to=command.reply_to, total=command.total, trace=command.trace,
        )  # fmt: skip

    async def _repeated(
        self, unit: Unit, items: Sequence[Item], existing: Mapping[str, Sandbox], now: float
    ) -> list[Sandbox]:
        """The present state of sandboxes that exist already, to be answered. One
        whose stop came first is completed, and its end announced."""
        out: list[Sandbox] = []
        adopted: dict[str, Sandbox] = {}
        for item in items:
            row = existing.get(item.uid)
            if row is None:
                continue
            if row.project != item.command.project:
                out.append(decide.only_reply(self._row(item, now), _taken(item)))
            elif row.request_id is None:
                adopted[row.uid] = decide.adopted(row, self._row(item, now))
                out.append(adopted[row.uid])
            else:
                out.append(decide.with_reply(row, item.command))
        for uid in await store.adopt(unit.connection, list(adopted.values())):
            row = adopted[uid]
            unit.changes.events.append(event_of(row, row.changed_at))
        return out


def _without_spec(item: Item) -> WireError | None:
    if item.spec is not None:
        return None
    return WireError(code="internal", message="the item has no spec", is_infra=True)


def _stopped(item: Item, job: Job | None) -> WireError | None:
    """The error of a sandbox whose job was stopped after it was asked for."""
    if job is None or not leases.starts_nothing(job, asked_at=item.command.asked_at or time.time()):
        return None
    text = f"job {job.id} was stopped before it was created"
    return WireError(code="sandbox_died", message=text, cause="cancelled")


def _taken(item: Item) -> WireError:
    return WireError(
        code="conflict",
        message=f"{item.uid} is a sandbox of another project",
        field="request_id",
    )


def _portions(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    source = iter(items)
    while portion := list(itertools.islice(source, size)):
        yield portion
