"""The three components as one thing to start, fault and stop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from devstack.credentials import load_or_make
from devstack.nats_server import NatsServer, Permissions
from devstack.postgres_server import PostgresServer
from devstack.valkey_server import ValkeyServer

COMPONENTS = ("nats", "postgres", "valkey")


@dataclass(frozen=True, slots=True)
class Endpoints:
    """How to reach the stack. All of it is secret.

    ``nats_users`` are user name -> password of the services' static NATS users
    (``auth scheduler imagesvc audit burst`` in account DSEC, ``sys`` in SYS).
    ``account_seed`` signs the auth callout's answers; ``pg_dsn_admin`` is the
    superuser's; ``redis_url`` carries its password.
    """

    nats_url: str
    nats_users: Mapping[str, str]
    account_seed: str
    account_public: str
    pg_dsn_admin: str
    redis_url: str


class Infra:
    """Embedded NATS, PostgreSQL and Valkey with all state under ``state_dir``.

    ``permissions`` limit the static NATS users: name -> ``{"publish": [subjects],
    "subscribe": [subjects]}``; a user without an entry may do everything in its account.

    One process per ``state_dir`` at a time. ``async with Infra(path) as endpoints``
    starts and stops it. Servers die with the thread that called :meth:`start`.
    """

    def __init__(
        self, state_dir: Path, *, permissions: Mapping[str, Permissions] | None = None
    ) -> None:
        self.state_dir = state_dir.resolve()
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._credentials = load_or_make(self.state_dir / "credentials.json")
        self._nats = NatsServer(self.state_dir, self._credentials, permissions)
        self._postgres = PostgresServer(self.state_dir, self._credentials.pg_password)
        self._valkey = ValkeyServer(self.state_dir, self._credentials.redis_password)
        self._by_name: dict[str, NatsServer | PostgresServer | ValkeyServer] = {
            "nats": self._nats,
            "postgres": self._postgres,
            "valkey": self._valkey,
        }

    @property
    def endpoints(self) -> Endpoints:
        return Endpoints(
            nats_url=self._nats.url,
            nats_users=dict(self._credentials.nats_passwords),
            account_seed=self._credentials.account_seed,
            account_public=self._credentials.account_public,
            pg_dsn_admin=self._postgres.dsn,
            redis_url=self._valkey.url,
        )

    async def start(self) -> Endpoints:
        """Start all three at once. When one fails, none is left running."""
        try:
            async with asyncio.TaskGroup() as group:
                for component in self._by_name.values():
                    group.create_task(component.start())
        except BaseException:
            await self.stop()
            raise
        return self.endpoints

    async def stop(self) -> None:
        """Stop all three. Idempotent; state stays under ``state_dir``."""
        await asyncio.gather(*(part.child.stop() for part in self._by_name.values()))

    async def kill(self, name: str) -> None:
        """SIGKILL one component (a name of ``COMPONENTS``); it stays down."""
        await self._by_name[name].child.kill()

    async def restart(self, name: str) -> None:
        """Stop one component where it runs, and start it on the same port."""
        await self._by_name[name].child.stop()
        await self._by_name[name].start()

    def pid(self, name: str) -> int | None:
        """Process id of one component, ``None`` while it is down."""
        return self._by_name[name].child.pid

    async def __aenter__(self) -> Endpoints:
        return await self.start()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()
