"""The first consumer of every request: one transaction a batch.

Owns: order, idempotency, charging, and what goes on to whom. Does not own: what a good
spec is (:mod:`services.auth.validate`), quota arithmetic (:mod:`services.auth.admission`),
changes of identity (:mod:`services.auth.iam`).

What a client may ask for was settled by the bus when it connected. A batch keeps its
order: an operation never overtakes a create that came before it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import ErrorReply, encode
from schemas.image import SnapshotCreate
from schemas.subjects import parse_client
from services.auth import access, granting, iam_store, store
from services.auth.admission import RATE, Account, admit, cost_of, give_back
from services.auth.asks import Ask, own_inbox
from services.auth.creates import Create, Refusal
from services.auth.delegation import holds
from services.auth.entries import Entry, messages, prepare, refusals_from, refusals_to
from services.auth.iam import IamDoor
from services.auth.overdue import release_ended
from services.auth.settings import Settings
from shared import ids, telemetry
from shared.bus import Bus, Outgoing
from shared.clock import Clock
from shared.consumer import Received
from shared.db import Database
from shared.errors import Conflict, DsecError, Forbidden, NotFound, Unavailable
from shared.outbox import Outbox
from shared.wire import to_wire

log = logging.getLogger(__name__)

IAM_ENTITIES = frozenset({"project", "key", "grant", "quota", "policy"})


class Requests:
    """Handles batches of ``auth_requests``."""

    def __init__(
        self, settings: Settings, *, db: Database, bus: Bus, outbox: Outbox, iam: IamDoor,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._db = db
        self._bus = bus
        self._outbox = outbox
        self._iam = iam
        self._clock = clock
        self._key = ids.new()

    async def handle(self, batch: Sequence[Received]) -> None:
        """Judges a batch in order; runs of other than iam requests together."""
        with telemetry.span("auth requests", parents=[m.trace for m in batch]):
            asks = [ask for m in batch if (ask := _ask(m)) is not None]
            for is_iam, group in itertools.groupby(asks, lambda a: a.entity in IAM_ENTITIES):
                if is_iam:
                    for ask in group:
                        await self._iam.handle(ask)
                else:
                    await self._bulk(list(group))

    async def _bulk(self, asks: list[Ask]) -> None:
        try:
            await self._settle(asks, final=False)
        except _Full:
            await release_ended(self._db, self._bus)
            await self._settle(asks, final=True)

    async def _settle(self, asks: list[Ask], *, final: bool) -> None:
        """One transaction. Unless ``final`` it is undone with ``_Full`` where a quota is
        full that may have room already."""
        entries = [prepare(ask, max_bytes=self._settings.auth_max_request_bytes) for ask in asks]
        async with self._db.transaction() as connection:
            await self._judge(connection, entries, final=final)
            out = messages(entries, now=self._clock.now())
            out.append(access.message([e.access() for e in entries], self._key))
            rows = await self._outbox.add(connection, out)
        self._outbox.sent_by_me(rows)
        for entry in entries:
            if entry.error is not None:
                await self._refuse(entry, entry.error)

    async def _refuse(self, entry: Entry, error: DsecError) -> None:
        if entry.ask.reply_to is None:
            return
        reply = ErrorReply(error=to_wire(error), request_id=entry.request_id or None)
        try:
            await self._bus.send(Outgoing(entry.ask.reply_to, encode(reply)))
        except Unavailable as exc:  # the client asks again; what was decided stays so
            log.debug("an answer was not sent: %s", exc.message)

    async def _judge(
        self, connection: AsyncConnection, entries: Sequence[Entry], *, final: bool
    ) -> None:
        live = [e for e in entries if e.error is None]
        firsts: dict[str, Entry] = {}
        for entry in live:
            firsts.setdefault(entry.key, entry)
        new, paths = await store.remember(connection, [e.row() for e in firsts.values()])
        for entry in live:
            if entry.ask.project not in paths:
                entry.error = NotFound(f"no project {entry.ask.project}", field="project")
                continue
            entry.projects = list(reversed(paths[entry.ask.project]))
            if entry.create is not None:
                entry.create.projects = list(entry.projects)
            elif isinstance(entry.command, SnapshotCreate) and entry.command.name is not None:
                await self._may_name(connection, entry)
        known = await store.remembered(connection, firsts.keys() - new)
        for key, entry in firsts.items():
            if key not in new and entry.error is None:
                _repeat(entry, known.get(key))
        for entry in live:
            if entry.create is not None and entry.error is None:
                await granting.judge(connection, entry.create, paths[entry.ask.project])
        fresh = [(e, e.create) for k, e in firsts.items() if k in new and e.create is not None]
        if fresh:
            await self._charge(connection, fresh, paths, final=final)
        for entry in live:
            if entry is not firsts[entry.key] and entry.error is None:
                _same_batch(entry, firsts[entry.key], known.get(entry.key))

    async def _may_name(self, connection: AsyncConnection, entry: Entry) -> None:
        """A snapshot with a name is an image: the bus has judged only the other grant."""
        path = list(reversed(entry.projects))
        held = await iam_store.held(connection, entry.ask.principal, path)
        if not holds(held, "image.create"):
            entry.error = Forbidden(
                f"a snapshot gets a name with image.create in {entry.ask.project}", field="name"
            )

    async def _charge(
        self, connection: AsyncConnection, fresh: Sequence[tuple[Entry, Create]],
        paths: dict[str, tuple[str, ...]], *, final: bool,
    ) -> None:  # fmt: skip
        """Charges new creates over their whole chains, as far as quotas allow."""
        chain = {p for e, _ in fresh for p in paths[e.ask.project]}
        accounts, now = await store.lock_accounts(connection, chain)
        for account in accounts.values():
            account.refill(now, burst_s=self._settings.auth_rate_burst_s)
        rows: list[store.ChargeRow] = []
        refusals: dict[str, list[Refusal]] = {}
        for entry, create in fresh:
            path = paths[entry.ask.project]
            if any(p not in accounts for p in path):  # deleted since the look-up
                entry.error = NotFound(f"no project {entry.ask.project}", field="project")
                continue
            refusals[entry.key] = self._admit(create, path, accounts, rows)
        if not final and any(map(_may_have_room, itertools.chain(*refusals.values()))):
            raise _Full
        taken = await store.charge(connection, rows, list(accounts.values()))
        if taken:
            self._hand_back(taken, rows, fresh, paths, accounts, refusals)
            await store.save_accounts(connection, accounts.values())
        for entry, create in fresh:
            create.refuse(refusals.get(entry.key, ()))
        stored = {k: refusals_to(r) for k, r in refusals.items() if r}
        await store.set_replies(connection, stored)

    def _admit(
        self, create: Create, path: tuple[str, ...], accounts: dict[str, Account],
        rows: list[store.ChargeRow],
    ) -> list[Refusal]:  # fmt: skip
        refusals = []
        costs = [
            cost_of(
                spec, default_cores=self._settings.auth_default_cores,
                default_memory_mb=self._settings.auth_default_memory_mb,
            )
            for spec in create.specs
        ]  # fmt: skip
        request, project = create.request.request_id, create.project
        for start, stop, spec in create.runs():
            cost = costs[spec]
            fits, error = admit(accounts, path, cost, stop - start)
            rows.extend(
                store.ChargeRow(create.uid(i), project, request, cost)
                for i in range(start, start + fits)
            )
            if error is not None:
                refusals.append(Refusal(start + fits, stop, to_wire(error)))
        return refusals

    def _hand_back(
        self, taken: store.Owned, rows: Iterable[store.ChargeRow],
        fresh: Sequence[tuple[Entry, Create]], paths: dict[str, tuple[str, ...]],
        accounts: dict[str, Account], refusals: dict[str, list[Refusal]],
    ) -> None:  # fmt: skip
        """A uid made from one request's id may be another request's id."""
        for row in rows:
            if (row.uid, row.request) in taken:
                give_back(accounts, paths[row.project], row.cost, 1)
        error = to_wire(Conflict("the uid is another request's sandbox", field="request_id"))
        for entry, create in fresh:
            request = create.request.request_id
            for index in range(create.total):
                if (create.uid(index), request) in taken:
                    refusals[entry.key].append(Refusal(index, index + 1, error))


class _Full(Exception):
    """A quota of what is in use refused."""


def _may_have_room(refusal: Refusal) -> bool:
    return refusal.error.field != f"quota.{RATE}"


def _ask(message: Received) -> Ask | None:
    client = parse_client(message.subject)
    if client is None:  # the stream takes no other; a map that grew is not ours to judge
        log.warning("not a request: %s", message.subject)
        return None
    return Ask(
        id=f"req-{message.stream_seq}-{message.msg.metadata.timestamp.timestamp():.6f}",
        at=message.msg.metadata.timestamp.timestamp(),
        project=client.project, entity=client.entity, verb=client.verb,
        principal=client.principal, body=message.data,
        reply_to=own_inbox(message.reply_to, client.principal), trace=message.trace,
    )  # fmt: skip


def _repeat(entry: Entry, row: store.RequestRow | None) -> None:
    """A request whose id was seen before: the same again, or another one."""
    if row is None or (row.project, row.verb, row.sha256) != (
        entry.ask.project, entry.ask.grant, entry.digest,
    ):  # fmt: skip
        entry.error = Conflict(
            f"request {entry.request_id} was something else before", field="request_id"
        )
    elif entry.create is not None:
        entry.create.refuse(refusals_from(row.reply))


def _same_batch(entry: Entry, first: Entry, row: store.RequestRow | None) -> None:
    if row is not None:
        _repeat(entry, row)
        return
    same = first.row()
    _repeat(entry, same)
    if entry.error is None:
        entry.error = first.error
        if entry.create is not None and first.create is not None:
            entry.create.refused = first.create.refused
            entry.create.spec_of = first.create.spec_of
