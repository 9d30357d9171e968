"""The door for reads: answers those about identity, passes the others on. What no stream
may keep (``put``) comes the same way.

Owns: scope (a read sees its subject's project and below), forwarding, one access
record each. Does not own: what the other services answer.

A read is answered by whichever instance gets it first (queue group ``auth``).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.audit import AuditQuery, DryRunQuery, RulesQuery, SuggestQuery, VerifyQuery
from schemas.base import HEADER_TRACE, BadMessage, ErrorReply, decode, encode
from schemas.grants import PUT_GRANTS, WHOAMI
from schemas.hotset import HotSetQuery
from schemas.iam import IamQuery, IamReply, QuotaInfo
from schemas.image import ImageExport, ImageQuery
from schemas.job import JobQuery
from schemas.sandbox import SandboxQuery
from schemas.subjects import ANONYMOUS, parse_client, rpc
from schemas.trajectory import OutputQuery, TrajectoryQuery
from services.auth import admission, iam_store, named, store
from services.auth.access import AccessBuffer, targets
from services.auth.asks import Ask, own_inbox, request_id
from services.auth.secrets import Secrets, unvalued
from services.auth.settings import Settings
from shared import ids
from shared.bus import Bus, Outgoing
from shared.clock import Clock
from shared.db import Database
from shared.errors import (
    DsecError,
    Internal,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    Unavailable,
    Unsupported,
)  # fmt: skip
from shared.wire import bad_message, to_wire

log = logging.getLogger(__name__)

SUBJECTS = ("dsec.get.v1.>", "dsec.put.v1.>")
QUEUE = "auth"
FORWARD_S = 5.0
AUDIT_QUERIES: dict[str, type[Any]] = {
    "list": AuditQuery, "rules": RulesQuery, "dry_run": DryRunQuery, "verify": VerifyQuery,
    "suggest": SuggestQuery,
}  # fmt: skip
UNSCOPED_QUERIES = frozenset({"rules", "verify"})
"""They tell nothing of any project."""
MAX_WAITING = 65_536
"""Reads that may wait for a slot."""


class Reads:
    """Answers ``dsec.get.v1.>`` and ``dsec.put.v1.>``."""

    def __init__(
        self, settings: Settings, *, db: Database, bus: Bus, records: AccessBuffer, clock: Clock,
        secrets: Secrets,
    ) -> None:  # fmt: skip
        self._secrets = secrets
        self._settings = settings
        self._db = db
        self._bus = bus
        self._records = records
        self._clock = clock
        self._slots = asyncio.Semaphore(settings.auth_reads)
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscriptions: list[Any] = []

    async def start(self) -> None:
        """Subscribes; the bus must be connected."""
        for subject in SUBJECTS:
            self._subscriptions.append(
                await self._bus.client.subscribe(
                    subject, queue=QUEUE, cb=self._received, pending_msgs_limit=MAX_WAITING
                )
            )

    async def close(self) -> None:
        """Takes no more and waits for the reads at hand."""
        if self._bus.client.is_connected:
            for subscription in self._subscriptions:
                await subscription.unsubscribe()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._settings.shutdown_s / 2)

    async def _received(self, message: Msg) -> None:
        await self._slots.acquire()
        task = asyncio.create_task(self._handle(message))
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and task.exception() is not None:
            log.error("a read failed", exc_info=task.exception())

    async def _handle(self, message: Msg) -> None:
        client = parse_client(message.subject)
        if client is None:
            return
        ask = Ask(
            id=ids.new(), at=self._clock.now(), project=client.project, entity=client.entity,
            verb=client.verb, principal=client.principal, body=message.data,
            reply_to=own_inbox(message.reply, client.principal),
            trace=(message.headers or {}).get(HEADER_TRACE),
        )  # fmt: skip
        outcome, target, answer = await self._answer(ask)
        if ask.reply_to is not None:
            try:
                await self._bus.send(Outgoing(ask.reply_to, answer))
            except DsecError as exc:
                log.debug("an answer was not sent: %s", exc.message)
        told = unvalued(ask) if ask.grant in PUT_GRANTS else ask
        await self._records.add(told.access(outcome, target=target))

    async def _answer(self, ask: Ask) -> tuple[str, str, bytes]:
        """Outcome, target and answer of a read; every error in its wire form."""
        try:
            return await self._read(ask)
        except BadMessage as exc:
            error = bad_message(exc)
        except DsecError as exc:
            error = exc
        except Exception as exc:
            log.exception("%s failed", ask.grant)
            error = Internal(f"{type(exc).__name__} in {ask.grant}")
        reply = ErrorReply(error=to_wire(error), request_id=request_id(ask.body))
        return error.code, "", encode(reply)

    async def _read(self, ask: Ask) -> tuple[str, str, bytes]:
        # an empty body asks without conditions
        body = ask.body or b"{}"
        if len(body) > self._settings.auth_max_request_bytes:
            raise InvalidRequest("the read's body is too large", field="payload")
        if ask.grant in PUT_GRANTS:
            changed, name = await self._secrets.change(ask)
            return "ok", name, encode(changed)
        if ask.entity == "sandbox" and ask.verb in ("get", "list"):
            query = decode(body, SandboxQuery)
            scoped: Any = msgspec.structs.replace(query, project=ask.project)
            await self._path(ask)
            return await self._forward("scheduler", "sandboxes", scoped, targets(query.uids))
        if ask.entity == "sandbox" and ask.verb == "trajectory":
            trail = decode(body, TrajectoryQuery)
            await self._path(ask)
            scoped = msgspec.structs.replace(trail, project=ask.project)
            return await self._forward("audit", "trajectory", scoped, trail.uid)
        if ask.entity == "sandbox" and ask.verb == "output":
            output = decode(body, OutputQuery)
            await self._path(ask)
            scoped = msgspec.structs.replace(output, project=ask.project)
            return await self._forward("audit", "outputs", scoped, output.uid)
        if ask.entity == "job" and ask.verb == "list":
            jobs = decode(body, JobQuery)
            await self._path(ask)
            scoped = msgspec.structs.replace(jobs, project=ask.project)
            return await self._forward("scheduler", "jobs", scoped, jobs.job or "")
        if ask.entity == "image" and ask.verb in ("get", "list"):
            images = decode(body, ImageQuery)
            path = await self._path(ask)
            scoped = msgspec.structs.replace(images, projects=list(reversed(path)))
            return await self._forward("imagesvc", "images", scoped, images.name or "")
        if ask.entity == "image" and ask.verb == "hot_set":
            await self._path(ask)
            return await self._forward("imagesvc", "hot_set", decode(body, HotSetQuery), "")
        if ask.entity == "image" and ask.verb == "export":
            export = decode(body, ImageExport)
            path = await self._path(ask)
            scoped = msgspec.structs.replace(export, projects=list(reversed(path)))
            return await self._forward("imagesvc", "export", scoped, ",".join(export.names))
        if ask.entity == "audit" and ask.verb in AUDIT_QUERIES:
            return await self._audit(ask, decode(body, AUDIT_QUERIES[ask.verb]))
        iam = decode(body, IamQuery)
        if ask.entity == "node" and ask.verb == "list":
            return await self._forward("scheduler", "nodes", iam, "")
        async with self._db.transaction() as connection:
            if ask.grant == "secret.list":
                await _existing(connection, ask.project)
                return "ok", "", encode(await self._secrets.listed(connection, ask.project))
            reply = await self._iam(connection, ask, iam)
        return "ok", iam.principal or iam.project or "", encode(reply)

    async def _path(self, ask: Ask) -> tuple[str, ...]:
        async with self._db.transaction() as connection:
            return await _existing(connection, ask.project)

    async def _audit(self, ask: Ask, query: Any) -> tuple[str, str, bytes]:
        if ask.verb in UNSCOPED_QUERIES:
            return await self._forward("audit", ask.verb, query, "")
        async with self._db.transaction() as connection:
            await _existing(connection, ask.project)
            below = await iam_store.projects_below(connection, ask.project)
        projects = [p.id for p in below]
        if query.project is not None:
            if query.project not in projects:
                raise NotFound(f"no project {query.project} in {ask.project}", field="project")
            projects = [query.project]
        scoped = msgspec.structs.replace(query, projects=projects)
        target = getattr(query, "target", None) or getattr(query, "uid", None) or ""
        return await self._forward("audit", ask.verb, scoped, target)

    async def _forward(
        self, service: str, verb: str, query: Any, target: str
    ) -> tuple[str, str, bytes]:
        """The service's answer as it came: nothing in it is read but whether it is an
        error."""
        try:
            reply = await self._bus.client.request(
                rpc(service, verb), encode(query), timeout=FORWARD_S
            )
        except NoRespondersError as exc:
            raise Unavailable(f"{service} is not there") from exc
        except (NatsError, TimeoutError) as exc:
            raise Unavailable(f"no answer from {service} in {FORWARD_S:g} s") from exc
        try:
            outcome = decode(reply.data, ErrorReply).error.code
        except BadMessage:
            outcome = "ok"
        return outcome, target, reply.data

    async def _iam(self, connection: AsyncConnection, ask: Ask, query: IamQuery) -> IamReply:
        path = await _existing(connection, ask.project)
        if (ask.entity, ask.verb) == WHOAMI:
            return await _whoami(connection, ask, path)
        target = query.project or ask.project
        path = await _existing(connection, target)
        if ask.project not in path:
            raise NotFound(f"no project {target} in {ask.project}", field="project")
        if ask.grant == "project.list":
            return IamReply(projects=await iam_store.projects_below(connection, target))
        if ask.grant == "key.list":
            keys = await iam_store.keys_below(connection, target, query.principal)
            return IamReply(keys=keys)
        if ask.grant == "policy.list":
            return IamReply(policies=await named.listed(connection, path))
        if ask.grant == "policy.get":
            if query.policy is None:
                raise InvalidRequest("which policy?", field="policy")
            return IamReply(policy=await named.find(connection, path, query.policy))
        if ask.grant == "grant.list":
            return await _grants(connection, ask, query, path)
        if ask.grant == "quota.get":
            account = (await iam_store.accounts(connection, [target]))[target]
            quota = QuotaInfo(
                project=target, limit=admission.limits_of(account),
                used=admission.used_of(account),
            )  # fmt: skip
            return IamReply(quota=quota)
        raise Unsupported(f"there is no {ask.grant}", field="verb")


async def _existing(connection: AsyncConnection, project: str) -> tuple[str, ...]:
    path = (await store.paths(connection, [project])).get(project)
    if path is None:
        raise NotFound(f"no project {project}", field="project")
    return path


async def _grants(
    connection: AsyncConnection, ask: Ask, query: IamQuery, path: tuple[str, ...]
) -> IamReply:
    """What a principal (by default the one who asks) holds in a project."""
    principal = query.principal or ask.principal
    if principal == ANONYMOUS:
        raise InvalidRequest("whose grants?", field="principal")
    held = await iam_store.held(connection, principal, path)
    return IamReply(principal=principal, grants=sorted(held))


async def _whoami(connection: AsyncConnection, ask: Ask, path: tuple[str, ...]) -> IamReply:
    if ask.principal == ANONYMOUS:
        raise Unauthenticated("the subject does not end in a principal", field="principal")
    held = await iam_store.held(connection, ask.principal, path)
    (project,) = [
        p for p in await iam_store.projects_below(connection, ask.project) if p.id == ask.project
    ]
    return IamReply(principal=ask.principal, project=project, grants=sorted(held))
