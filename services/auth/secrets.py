"""Secrets of projects: set, listed, removed by clients; given to the node that needs them.

Owns: both doors and the order of steps. Does not own: sealing, SQL, what a binding may be
(:mod:`services.auth.bindings`). Values come by core requests, which no stream keeps; no
answer to a client holds one. A node gets values of a sandbox that the scheduler says is
its own, and of those only what the sandbox was bound to: a captured node reads what it
could see pass anyway.
"""

from __future__ import annotations

import dataclasses
import logging

from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import decode
from schemas.sandbox import SandboxInfo, SandboxPage, SandboxQuery
from schemas.secret import (
    GivenSecret,
    SecretInfo,
    SecretRemove,
    SecretReply,
    SecretSet,
    SecretsGiven,
    SecretsWanted,
)
from schemas.subjects import ANONYMOUS, rpc
from services.auth import bindings, iam_store, rules, secret_store, store
from services.auth.asks import Ask
from services.auth.sealing import Sealer
from shared.bus import Bus, Incoming
from shared.clock import Clock
from shared.db import Database
from shared.errors import (
    DsecError,
    Forbidden,
    NotFound,
    QuotaExceeded,
    Unauthenticated,
    Unsupported,
)  # fmt: skip
from shared.lifecycle import TERMINAL

log = logging.getLogger(__name__)

SUBJECT = "dsec.rpc.v1.auth.secrets.*"
QUEUE = "auth"


class Secrets:
    """See the module."""

    def __init__(self, sealer: Sealer, *, db: Database, bus: Bus, clock: Clock) -> None:
        self._sealer, self._db, self._bus, self._clock = sealer, db, bus, clock

    async def change(self, ask: Ask) -> tuple[SecretReply, str]:
        """A client's change: its answer and the name it is about."""
        if ask.principal == ANONYMOUS:
            raise Unauthenticated("the subject ends in your principal", field="principal")
        if ask.grant == "secret.set":
            wanted = decode(ask.body, SecretSet)
            bindings.check_value(wanted.value)
            async with self._db.transaction() as connection:
                await self._may(connection, ask)
                info = await self._set(connection, ask, wanted)
            return SecretReply(request_id=wanted.request_id, secret=info), wanted.name
        if ask.grant == "secret.remove":
            gone = decode(ask.body, SecretRemove)
            async with self._db.transaction() as connection:
                await self._may(connection, ask)
                if not await secret_store.remove(connection, ask.project, gone.name):
                    raise NotFound(f"the project has no secret {gone.name}", field="name")
            return SecretReply(request_id=gone.request_id), gone.name
        raise Unsupported(f"there is no {ask.grant}", field="verb")

    async def _may(self, connection: AsyncConnection, ask: Ask) -> None:
        path = (await store.paths(connection, [ask.project])).get(ask.project)
        if path is None:
            raise NotFound(f"no project {ask.project}", field="project")
        held = await iam_store.held(connection, ask.principal, path)
        rules.may(held, ask.grant, project=ask.project)

    async def _set(self, connection: AsyncConnection, ask: Ask, wanted: SecretSet) -> SecretInfo:
        project, name = ask.project, wanted.name
        await iam_store.lock_changes(connection)
        old = (await secret_store.find(connection, project, [name])).get(name)
        if old is None and await secret_store.count(connection, project) >= secret_store.MAX_LISTED:
            raise QuotaExceeded(f"at most {secret_store.MAX_LISTED} secrets", field="name")
        if old is not None and self._same(old, project, wanted):
            return old.info  # asked again
        info = SecretInfo(
            name=name, version=old.info.version + 1 if old else 1,
            hosts=sorted(set(wanted.hosts)), plain=wanted.plain, changed_at=self._clock.now(),
            changed_by=ask.principal,
        )  # fmt: skip
        sealed = self._sealer.seal(wanted.value, project=project, name=name)
        await secret_store.put(connection, project, secret_store.Row(info, sealed))
        return info

    def _same(self, old: secret_store.Row, project: str, wanted: SecretSet) -> bool:
        if (old.info.hosts, old.info.plain) != (sorted(set(wanted.hosts)), wanted.plain):
            return False
        try:
            return self._sealer.open(old.sealed, project=project, name=wanted.name) == wanted.value
        except DsecError:  # under a key that is gone: this one is new in any case
            return False

    async def listed(self, connection: AsyncConnection, project: str) -> SecretReply:
        """Those of a project, without values."""
        rows = await secret_store.find(connection, project)
        return SecretReply(secrets=[row.info for row in rows.values()])

    # -- nodes --------------------------------------------------------------------------

    def answer_on(self, bus: Bus) -> None:
        """Answers nodes; before the bus starts."""
        bus.answer(SUBJECT, SecretsWanted, self.given, queue=QUEUE)

    async def given(self, wanted: SecretsWanted, incoming: Incoming) -> SecretsGiven:
        """The values of a sandbox of the node that asks. Raises ``Forbidden``."""
        node = incoming.subject.rpartition(".")[2]
        info = await self._sandbox(wanted)
        if info is None or info.node != node or info.state in TERMINAL or info.spec is None:
            raise Forbidden(f"no sandbox {wanted.uid} lives on node {node}", field="uid")
        bound = info.spec.secrets
        async with self._db.transaction() as connection:
            rows = await secret_store.find(connection, info.project, bound)
        given = {
            name: GivenSecret(
                value=self._sealer.open(row.sealed, project=info.project, name=name),
                plain=row.info.plain,
            )
            for name, row in rows.items()
            if not bindings.outside(row.info.hosts, bound[name])
        }  # fmt: skip
        return SecretsGiven(secrets=given)

    async def _sandbox(self, wanted: SecretsWanted) -> SandboxInfo | None:
        query = SandboxQuery(uids=[wanted.uid], project=wanted.project)
        page = await self._bus.request(rpc("scheduler", "sandboxes"), query, SandboxPage)
        return next((s for s in page.sandboxes if s.uid == wanted.uid), None)


def unvalued(ask: Ask) -> Ask:
    """The ask for its record: a digest of a body with a value would be a way to guess it."""
    return dataclasses.replace(ask, body=b"")
