"""Who may connect to the bus: the answer to NATS's auth callout.

Owns: judging a credential and compiling its permissions. Does not own: their meaning
(:mod:`services.auth.permissions`), the JWTs' form (:mod:`services.auth.natsjwt`).

A refused client learns only that; the log says why, without the credential. While the
database is away there is no answer at all: the server then ends the attempt as timed
out, which a client takes for an outage, not for a bad key.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

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
from services.auth.oidc import OidcUser, Verifier
from services.auth.settings import Settings
from shared.bus import Bus
from shared.clock import Clock
from shared.db import Database
from shared.errors import DsecError, Unauthenticated, Unavailable

log = logging.getLogger(__name__)

QUEUE = "auth"
MAX_WAITING = 16_384
"""Connection requests that may wait; the server drops those that waited too long."""


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
        self._verifier = Verifier(settings) if settings.oidc_issuer else None
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
        async with self._db.transaction() as connection:
            identity = await iam_store.identity(connection, key.principal)
        for stored, end in identity.keys if identity else ():
            if tokens.matches(key.text, stored):
                if end is not None and end <= now:
                    raise Unauthenticated(f"the key of {key.principal} has expired")
                assert identity is not None
                return Admitted(identity, end)
        raise Unauthenticated(f"no valid key of {key.principal}")

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
