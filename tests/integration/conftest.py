"""One embedded stack for the integration tests, a database of its own for each module.

The stack lives in a thread with an event loop of its own: servers end with the thread
that started them, and a test's loop ends with the test.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from devstack import Endpoints, Infra
from shared.migrate import prepare
from shared.settings import Common
from tests.s3server import S3Server, s3_server

T = TypeVar("T")
PASSWORD = "of-a-test"


class Stack:
    """The running servers. ``run`` carries out ``kill``, ``restart`` … in their thread."""

    def __init__(self, state_dir: Path) -> None:
        self.infra = Infra(state_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.endpoints: Endpoints = self.run(self.infra.start())

    def run(self, work: Awaitable[T]) -> T:
        """The result of ``work`` done in the stack's loop."""

        async def wrapped() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(120)

    async def do(self, work: Awaitable[T]) -> T:
        """As :meth:`run`, from a test's loop."""
        return await asyncio.to_thread(self.run, work)

    def settings(self, user: str = "scheduler", **fields: object) -> Common:
        """Settings of a service's connection."""
        return Common(
            nats_url=self.endpoints.nats_url,
            nats_user=user,
            nats_password=self.endpoints.nats_users[user],
            **fields,  # type: ignore[arg-type]
        )

    def close(self) -> None:
        """Ends servers and thread."""
        self.run(self.infra.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Servers that all tests share: leave them running."""
    made = Stack(tmp_path_factory.mktemp("stack"))
    yield made
    made.close()


@pytest.fixture
def own_stack(tmp_path: Path) -> Iterator[Stack]:
    """Servers of one test, to be killed and restarted."""
    made = Stack(tmp_path / "stack")
    yield made
    made.close()


async def make_database(admin_dsn: str) -> str:
    """A new, empty database; returns its admin DSN."""
    name = f"test_{secrets.token_hex(6)}"
    connection = await asyncpg.connect(admin_dsn)
    await connection.execute(f"create database {name}")
    await connection.close()
    return urlunsplit(urlsplit(admin_dsn)._replace(path=f"/{name}"))


@pytest.fixture(scope="module")
def admin_dsn(stack: Stack) -> str:
    """A database of the module's own."""
    return stack.run(make_database(stack.endpoints.pg_dsn_admin))


@pytest.fixture(scope="module")
def dsn_of(stack: Stack, admin_dsn: str) -> Callable[[str], str]:
    """``dsn_of("audit")``: the DSN of a service's role, its schema migrated."""
    made: dict[str, str] = {}

    def get(service: str) -> str:
        if service not in made:
            made.update(stack.run(prepare(admin_dsn, {service: PASSWORD})))
        return made[service]

    return get


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """An S3 server; tests keep apart by prefix."""
    with s3_server() as server:
        yield server
