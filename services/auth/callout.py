"""Who may connect to the bus: the answer to NATS's auth callout.

Owns: judging a credential and compiling its permissions. Does not own: their meaning
(:mod:`services.auth.permissions`), the JWTs' form (:mod:`services.auth.natsjwt`).

A refused client learns only that; the log says why, without the credential. Each
connect reads the database, so a change counts at once. While the database is away,
who was let in of late is let in again: edges and trainers whose connections break then
need no database to go on. A stranger has to wait; the server calls that a violation
too, so clients repeat a refused connect for a while before they believe it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from services.auth import iam_store, permissions, tokens
from services.auth.iam_store import Identity
from services.auth.natsjwt import (
    REQUEST_SUBJECT,
    BadRequestToken,
    ConnectRequest,
    Signer,
    read_request,
)  # fmt: skip
from services.auth.settings import Settings
from shared.bus import Bus
from shared.clock import Clock
from shared.db import Database
from shared.errors import DsecError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from services.auth.oidc import OidcUser, Verifier

log = logging.getLogger(__name__)

QUEUE = "auth"
KNOWN = 10_000
MAX_WAITING = 16_384
"""Connection requests that may wait; the server drops those that waited too long."""


class LastKnown:
    """The last identities that were read, for times without a database. At most
    ``KNOWN`` of them, none older than ``max_age_s``."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s
        self._known: OrderedDict[str, tuple[float, Identity]] = OrderedDict()
        self._changed_at = -math.inf

    def put(self, identity: Identity, now: float) -> None:
        """Remembers what was read at ``now``, unless that may be from before a change."""
        if now <= self._changed_at:
            return
        self._known[identity.principal] = (now, identity)
        self._known.move_to_end(identity.principal)
        if len(self._known) > KNOWN:
            self._known.popitem(last=False)

    def get(self, principal: str, now: float) -> Identity | None:
        """What was read of late."""
        at, identity = self._known.get(principal, (-math.inf, None))
        return identity if now - at <= self._max_age_s else None

    def forget(self, principal: str) -> None:
        """The database says that there is no such principal."""
        self._known.pop(principal, None)

    def changed(self, principals: Collection[str], now: float) -> None:
        """What was read of these until ``now`` holds no more."""
        self._changed_at = now
        for principal in principals:
            self.forget(principal)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A judged credential and when it ends (``None``: never)."""

    identity: Identity
    expires_at: float | None


class Callout:
    """Answers ``$SYS.REQ.USER.AUTH`` together with the other instances."""

    def __init__(self, settings: Settings, *, db: Database, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._db = db
        self._bus = bus
        self._clock = clock
        self._signer = Signer(settings.auth_account_seed, account=settings.auth_account)
        self._verifier = _verifier(settings)
        self._known = LastKnown(settings.auth_last_known_s)
        self._slots = asyncio.Semaphore(settings.auth_connects)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribes; the bus must be connected."""
        await self._bus.client.subscribe(
            REQUEST_SUBJECT, queue=QUEUE, cb=self._received, pending_msgs_limit=MAX_WAITING
        )

    async def close(self) -> None:
        """Waits for the requests at hand."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.shutdown_s / 2)

    def forget(self, principals: Collection[str]) -> None:
        """What was read of them holds no more, whatever becomes of the database: an outage
        gives nobody back what was taken from him. Whichever instance took it tells this one."""
        self._known.changed(principals, self._clock.now())

    async def _received(self, message: Msg) -> None:
        await self._slots.acquire()
        task = asyncio.create_task(self._answer(message))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()

    async def _answer(self, message: Msg) -> None:
        try:
            request = read_request(message.data)
        except BadRequestToken as exc:
            log.error("not an authorization request: %s", exc)
            return
        try:
            answer = await self.judge(request)
        except Unavailable as exc:
            log.warning("a connection waits in vain: %s", exc.message)
            return
        except Exception:
            log.exception("a connection could not be judged")
            return
        with contextlib.suppress(NatsError):  # the server asks again with the client
            await message.respond(answer)

    async def judge(self, request: ConnectRequest) -> bytes:
        """The signed answer to a request. Raises ``Unavailable``."""
        now = self._clock.now()
        try:
            admitted = await self._admit(request.token, now)
            allowed = self._compile(admitted.identity)
        except Unavailable:
            raise
        except DsecError as exc:
            log.info("connection refused: %s", exc.message)
            return self._signer.answer(request, now=now)
        end = now + self._settings.auth_session_s
        if admitted.expires_at is not None:
            end = min(end, admitted.expires_at)
        user = self._signer.user(
            request, allowed, name=admitted.identity.principal, now=now, expires_at=end
        )
        return self._signer.answer(request, now=now, user=user)

    def _compile(self, identity: Identity) -> permissions.Permissions:
        if identity.kind == "node" and identity.node:
            return permissions.node(identity.principal, identity.node)
        return permissions.client(
            identity.principal, identity.home, identity.scopes,
            max_subjects=self._settings.auth_max_subjects,
        )  # fmt: skip

    async def _admit(self, token: str, now: float) -> Admitted:
        key = tokens.parse(token)
        if key is not None:
            return await self._by_key(key, now)
        if self._verifier is not None and token.count(".") == 2:
            return await self._by_token(await self._verifier.verify(token))
        raise Unauthenticated("no credential of a known form")

    async def _by_key(self, key: tokens.ApiKey, now: float) -> Admitted:
        identity = await self._identity(key.principal, now)
        for stored, end in identity.keys if identity else ():
            if tokens.matches(key.text, stored):
                if end is not None and end <= now:
                    raise Unauthenticated(f"the key of {key.principal} has expired")
                assert identity is not None
                return Admitted(identity, end)
        raise Unauthenticated(f"no valid key of {key.principal}")

    async def _identity(self, principal: str, now: float) -> Identity | None:
        try:
            async with self._db.transaction() as connection:
                identity = await iam_store.identity(connection, principal)
        except Unavailable:
            identity = self._known.get(principal, now)
            if identity is None:
                raise
            return identity
        if identity is None:
            self._known.forget(principal)
        else:
            self._known.put(identity, now)
        return identity

    async def _by_token(self, user: OidcUser) -> Admitted:
        """The token's principal, with its claims as they are now. Written only where
        they changed: most connects read."""
        async with self._db.transaction() as connection:
            identity = await iam_store.identity(connection, user.principal)
            known = await iam_store.existing(connection, user.grants)
            if identity and await iam_store.claimed(connection, user.principal) == known:
                return Admitted(identity, user.expires_at)
            if not known and identity is None:
                raise Unauthenticated(f"{user.principal} is in no project")
            if identity is None:
                home = min(project for project, _ in known)
                await iam_store.add_principal(
                    connection, id_=user.principal, kind="user", name=user.name, project=home,
                    node=None,
                )  # fmt: skip
            await iam_store.claim(connection, user.principal, known)
            identity = await iam_store.identity(connection, user.principal)
        assert identity is not None
        return Admitted(identity, user.expires_at)


def _verifier(settings: Settings) -> Verifier | None:
    if not settings.oidc_issuer:
        return None
    from services.auth.oidc import Verifier  # ten megabytes that most systems can do without

    return Verifier(settings)
