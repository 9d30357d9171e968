"""auth on real NATS (with its auth callout) and PostgreSQL, and clients of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest
import pytest_asyncio
from nats.aio.client import Client

from devstack import Endpoints, Infra
from schemas.base import encode
from schemas.sandbox import SandboxEvent
from schemas.subjects import evt_sandbox
from services.auth import bootstrap
from services.auth.app import App
from services.auth.settings import Settings
from shared import ids, migrate, topology
from shared.bus import Bus, Outgoing
from shared.db import Database
from shared.settings import Common

ANSWER_S = 60.0
DECIDED_S = 1.0
"""A refusal sooner than this was somebody's decision."""
ROOT = "root"


MARKS = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="session")]
"""For every module of this folder: the stack lives in the session's loop."""


@dataclass
class Stack:
    """A running auth with its database and bus."""

    endpoints: Endpoints
    settings: Settings
    app: App
    db: Database
    bus: Bus
    secrets: bootstrap.Secrets

    def service(self, name: str) -> Common:
        """Settings of another service's user on the bus."""
        return Common(
            nats_url=self.endpoints.nats_url, nats_user=name,
            nats_password=self.endpoints.nats_users[name],
        )  # fmt: skip


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    """One for all tests: each makes projects of its own."""
    async with Infra(tmp_path_factory.mktemp("stack")) as endpoints:
        dsns = await migrate.prepare(endpoints.pg_dsn_admin, {"auth": "secret of auth"})
        secrets = await bootstrap.bootstrap(
            dsns["auth"], endpoints.account_seed, project=ROOT, nodes=["n1"]
        )
        settings = make_settings(endpoints, dsns["auth"])
        app = App(settings)
        await app.start()
        await topology.declare(app.bus.js)
        stack = Stack(endpoints, settings, app, app.db, app.bus, secrets)
        await ready(app)
        yield stack
        await app.close()


async def ready(app: App) -> None:
    """Waits until the app's consumers are bound."""
    async with asyncio.timeout(ANSWER_S):
        while not (app.requests.last_fetch_at and app.releases.last_fetch_at):
            await asyncio.sleep(0.02)


def make_settings(endpoints: Endpoints, dsn: str, **more: Any) -> Settings:
    """What services.local would put into the environment."""
    return Settings(
        nats_url=endpoints.nats_url, nats_user="auth",
        nats_password=endpoints.nats_users["auth"], pg_dsn=dsn,
        auth_account_seed=endpoints.account_seed, sys_user="sys",
        sys_password=endpoints.nats_users["sys"], **more,
    )  # fmt: skip


@dataclass
class Person:
    """A client that speaks plain NATS."""

    nc: Client
    principal: str
    inbox: str
    errors: list[Exception] = field(default_factory=list)
    disconnects: int = 0

    async def request(
        self, project: str, entity: str, verb: str, body: Any, *, anonymous: bool = False
    ) -> dict[str, Any]:
        """Stores a request and returns the first answer on an inbox of its own."""
        subject = f"dsec.req.v1.{project}.{entity}.{verb}"
        if not anonymous:
            subject += f".{self.principal}"
        answer = f"{self.inbox}.{ids.new()}"
        answered = asyncio.get_running_loop().create_future()

        async def take(message: Any) -> None:
            if not answered.done():
                answered.set_result(message.data)

        # by a callback: the answer may be read at once with the end of the connection
        answers = await self.nc.subscribe(answer, cb=take)
        await self.nc.flush()
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            await self.nc.request(subject, data, timeout=ANSWER_S, headers={"Dsec-Reply": answer})
            async with asyncio.timeout(ANSWER_S):
                found = await answered
        finally:
            if self.nc.is_connected:
                await answers.unsubscribe()
        return json.loads(found)

    async def change(self, project: str, entity: str, verb: str, /, **body: Any) -> dict[str, Any]:
        """A change of identity."""
        return await self.request(project, entity, verb, {"request_id": ids.new(), **body})

    async def read(self, project: str, entity: str, verb: str, /, **query: Any) -> dict[str, Any]:
        """A read, attributed."""
        reply = await self.nc.request(
            f"dsec.get.v1.{project}.{entity}.{verb}.{self.principal}",
            json.dumps(query).encode(), timeout=ANSWER_S,
        )  # fmt: skip
        return json.loads(reply.data)


async def connect(
    stack: Stack, key: str, *, principal: str | None = None, patient: bool = True
) -> Person:
    """Connects with an API key or token, without coming back by itself. ``patient``: as the
    SDK, it believes no refusal that came late: nobody has decided it."""
    principal = principal or key.split("_")[1]
    inbox = f"_INBOX.{principal}.{ids.new()}"
    person = Person(None, principal, inbox)  # type: ignore[arg-type]

    async def on_error(exc: Exception) -> None:
        person.errors.append(exc)

    async def on_disconnect() -> None:
        person.disconnects += 1

    end = time.monotonic() + ANSWER_S
    while True:
        begun = time.monotonic()
        try:
            person.nc = await nats.connect(
                stack.endpoints.nats_url, token=key, inbox_prefix=inbox, allow_reconnect=False,
                error_cb=on_error, disconnected_cb=on_disconnect, connect_timeout=60,
            )  # fmt: skip
        except nats.errors.Error:
            now = time.monotonic()
            if not patient or now - begun < DECIDED_S or now > end:
                raise
            continue
        if person.nc.is_connected:
            person.errors.clear()
            return person
        # the server's PING after two seconds without a verdict ends nats-py's connect too,
        # without a connection and without an error
        await person.nc.close()


@pytest_asyncio.fixture(loop_scope="session")
async def admin(stack: Stack) -> AsyncIterator[Person]:
    """The administrator of the root project."""
    person = await connect(stack, stack.secrets.admin_key)
    yield person
    await person.nc.close()


async def new_project(admin: Person, parent: str = ROOT, **more: Any) -> str:
    """A project with a name of its own."""
    name = "p-" + ids.new()[-12:]
    reply = await admin.change(parent, "project", "create", name=name, id=name, **more)
    assert "error" not in reply, reply
    return str(reply["project"]["id"])


async def new_key(admin: Person, project: str, *grants: str, **more: Any) -> dict[str, Any]:
    """A key made by ``admin``: id, principal, secret …"""
    reply = await admin.change(
        project, "key", "create", name=f"k-{ids.new()}", grants=list(grants), **more
    )
    assert "error" not in reply, reply
    return dict(reply["key"])


async def used(stack: Stack, project: str) -> tuple[int, int, int]:
    """Sandboxes, thousandths of a core and MiB that a project is charged."""
    from sqlalchemy import text

    async with stack.db.transaction() as connection:
        row = (
            await connection.execute(
                text("select sandboxes, millicores, memory_mb from usage where project = :p"),
                {"p": project},
            )
        ).one()
    return row[0], row[1], row[2]


class Once:
    """Whether a stored message is new. A listener hears also what was sent again because its
    acknowledgement came late; the stream keeps that once."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, message: Any) -> bool:
        id_ = (message.headers or {}).get("Nats-Msg-Id")
        if id_ is None:
            return True
        new = id_ not in self._seen
        self._seen.add(id_)
        return new


class Records:
    """Access records on a bus, as its stream keeps them."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._new = Once()

    async def hear(self, message: Any) -> None:
        if self._new(message):
            self.all.extend(json.loads(message.data)["records"])

    async def on(self, client: Client) -> Any:
        """Listens from now on; the subscription."""
        subscription = await client.subscribe("dsec.evt.v1.auth.access.*", cb=self.hear)
        await client.flush()
        return subscription


class Commands:
    """What auth sends to the scheduler, collected."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, dict[str, Any]]] = []
        self._new = Once()

    async def hear(self, message: Any) -> None:
        if self._new(message):
            self.messages.append((message.subject, json.loads(message.data)))

    def creates(self, project: str) -> list[dict[str, Any]]:
        """Create commands of one project."""
        return [
            c for s, m in self.messages if ".sandbox.create." in s
            for c in m["commands"] if c["project"] == project
        ]  # fmt: skip

    async def wait(self, project: str, count: int) -> list[dict[str, Any]]:
        """``count`` create commands of one project."""
        async with asyncio.timeout(ANSWER_S):
            while len(found := self.creates(project)) < count:
                await asyncio.sleep(0.01)
        return found


@pytest_asyncio.fixture(loop_scope="session")
async def commands(stack: Stack) -> AsyncIterator[Commands]:
    """Everything on ``dsec.cmd.v1.>`` from now on."""
    heard = Commands()
    subscription = await stack.bus.client.subscribe("dsec.cmd.v1.>", cb=heard.hear)
    await stack.bus.client.flush()
    yield heard
    await subscription.unsubscribe()


FAKE = {"backend": "fake", "cpu_cores_limit": 0.5, "memory_limit_mb": 64}
QUIET_S = 0.4
"""Long enough for something that must not happen."""


def body(*specs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"request_id": ids.new(), "specs": list(specs), **more}


async def send(person: Person, project: str, request: Any, *, anonymous: bool = False) -> None:
    """Publishes a create and waits for the stream's acknowledgement."""
    subject = f"dsec.req.v1.{project}.sandbox.create"
    if not anonymous:
        subject += f".{person.principal}"
    await person.nc.request(subject, json.dumps(request).encode(), timeout=ANSWER_S)


def refusals(command: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Errors of a create command's items by index."""
    return {i[1]: i[3] for i in command["items"] if len(i) > 3 and i[3] is not None}


async def over(stack: Stack, project: str, uid: str, state: str = "stopped") -> None:
    """What the scheduler says when a sandbox is over."""
    event = SandboxEvent(uid=uid, project=project, state=state, generation=1, at=0.0)
    await stack.bus.store([Outgoing(evt_sandbox(project, state, uid), encode(event))])


async def until_used(stack: Stack, project: str, amounts: tuple[int, int, int]) -> None:
    async with asyncio.timeout(ANSWER_S):
        while await used(stack, project) != amounts:
            await asyncio.sleep(0.02)
