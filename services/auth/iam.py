"""Changes of identity: projects, keys, grants, quotas, named policies; one transaction each.

Owns: the order of steps of each change. Does not own: judgements
(:mod:`services.auth.rules`), SQL, dropping connections (:mod:`services.auth.kick`).

Every change is judged against what the caller holds *now*, not when it connected, and
changes exclude each other, so that two of them cannot together do what neither may.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

import msgspec
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import BadMessage, ErrorReply, decode, encode
from schemas.iam import IamReply
from schemas.subjects import ANONYMOUS
from services.auth import access, changes, iam_store, named, rules, store, tokens
from services.auth.asks import MAX_ID, Ask, request_id
from services.auth.changes import Change, Done
from services.auth.kick import Kicker
from services.auth.settings import Settings
from shared import ids
from shared.bus import Bus, Outgoing
from shared.clock import Clock
from shared.db import Database
from shared.errors import (
    Conflict,
    DsecError,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)  # fmt: skip
from shared.outbox import Outbox
from shared.wire import bad_message, to_wire

log = logging.getLogger(__name__)

CHANGES = changes.CHANGES | named.CHANGES
_reply_decoder = msgspec.json.Decoder(IamReply)


@dataclass(slots=True)
class Outcome:
    """An answer to be sent, and the connections to be dropped after it."""

    answer: Any
    affected: frozenset[str] = field(default_factory=frozenset)


class IamDoor:
    """Handles requests about projects, keys, grants, quotas and named policies."""

    def __init__(
        self, settings: Settings, *, db: Database, bus: Bus, outbox: Outbox, kicker: Kicker,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._settings = settings
        self._db = db
        self._bus = bus
        self._outbox = outbox
        self._kicker = kicker
        self._clock = clock
        self._key = ids.new()
        self._root_secret = tokens.root_secret(settings.auth_account_seed)

    async def handle(self, ask: Ask) -> None:
        """Does one change, answers it, then drops the connections it affects."""
        try:
            outcome = await self._attempt(ask)
        except Unavailable:
            raise
        except DsecError as exc:
            outcome = await self._refused(ask, exc)
        if outcome.affected:
            await self._kicker.forget(outcome.affected)
        if ask.reply_to is not None:
            try:
                await self._bus.send(Outgoing(ask.reply_to, encode(outcome.answer)))
            except DsecError as exc:
                log.debug("an answer was not sent: %s", exc.message)
        if outcome.affected:
            self._kicker.drop(outcome.affected)

    async def _refused(self, ask: Ask, error: DsecError) -> Outcome:
        request = request_id(ask.body)
        async with self._db.transaction() as connection:
            record = ask.access(error.code, request_id=request or "")
            rows = await self._outbox.add(connection, [access.message([record], self._key)])
        self._outbox.sent_by_me(rows)
        return Outcome(ErrorReply(error=to_wire(error), request_id=request))

    async def _attempt(self, ask: Ask) -> Outcome:
        body, change = self._read(ask)
        key = f"{ask.project}/{body.request_id}"
        digest = hashlib.sha256(ask.body).digest()
        row = store.RequestRow(key, ask.project, ask.principal, ask.grant, digest)
        async with self._db.transaction() as connection:
            await iam_store.lock_changes(connection)
            new, paths = await store.remember(connection, [row])
            path = paths.get(ask.project)
            if path is None:
                raise NotFound(f"no project {ask.project}", field="project")
            if not new:
                known = (await store.remembered(connection, [key]))[key]
                done = _again(row, known)
            else:
                done = await self._change(connection, ask, body, path, change)
                stored = encode(done.reply)
                await store.set_replies(connection, {key: stored})
            record = ask.access("ok", target=done.target, request_id=body.request_id)
            rows = await self._outbox.add(connection, [access.message([record], self._key)])
        self._outbox.sent_by_me(rows)
        return Outcome(self._with_secret(done.reply, ask), done.affected)

    def _read(self, ask: Ask) -> tuple[Any, Change]:
        if ask.grant not in CHANGES:
            raise Unsupported(f"there is no {ask.grant}", field="verb")
        if ask.principal == ANONYMOUS:
            raise Unauthenticated(
                "a change of identity needs the subject that ends in your principal",
                field="principal",
            )
        type_, change = CHANGES[ask.grant]
        try:
            body = decode(ask.body, type_)
        except BadMessage as exc:
            raise bad_message(exc) from exc
        if not 0 < len(body.request_id) <= MAX_ID:
            raise InvalidRequest(f"1 to {MAX_ID} characters", field="request_id")
        return body, change

    async def _change(
        self, connection: AsyncConnection, ask: Ask, body: Any, path: tuple[str, ...],
        change: Change,
    ) -> Done:  # fmt: skip
        context = changes.Context(
            connection=connection, settings=self._settings, now=self._clock.now(),
            caller=ask.principal, project=ask.project, path=path,
            held=await iam_store.held(connection, ask.principal, path),
            root_secret=self._root_secret,
        )  # fmt: skip
        rules.may(context.held, ask.grant, project=ask.project)
        done = await change(context, body)
        done.reply = msgspec.structs.replace(done.reply, request_id=body.request_id)
        return done

    def _with_secret(self, reply: IamReply, ask: Ask) -> IamReply:
        """A new key's answer, and only that, shows its secret."""
        if ask.grant != "key.create" or reply.key is None:
            return reply
        secret = tokens.derive(self._root_secret, reply.key.principal, reply.key.id)
        shown = msgspec.structs.replace(reply.key, secret=secret)
        return msgspec.structs.replace(reply, key=shown)


def _again(row: store.RequestRow, known: store.RequestRow) -> Done:
    """The stored answer to the same request by the same principal."""
    same = (row.project, row.principal, row.verb, row.sha256) == (
        known.project, known.principal, known.verb, known.sha256,
    )  # fmt: skip
    if not same or known.reply is None:
        raise Conflict(
            f"request {row.id.partition('/')[2]} was something else before", field="request_id"
        )
    return Done(_reply_decoder.decode(known.reply))
