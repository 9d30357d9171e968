"""A scheduler on real NATS, PostgreSQL and Valkey, with its edges and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import pytest_asyncio

from devstack import Endpoints, Infra
from schemas.streams import STREAMS
from services.scheduler.app import App
from services.scheduler.settings import Settings
from shared.migrate import prepare, service_dsn
from tests.integration.scheduler.world import SimEdge, Trainer, connect

CLOSE_S = 60.0
SILENT: dict[str, Any] = {"silence_s": 2.0, "lost_grace_s": 1.0}
"""For tests of silence. With others, one that the machine holds up shall not be lost."""
PASSWORD = "scheduler-test"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def infra(tmp_path_factory: Any) -> AsyncIterator[Infra]:
    folder: Path = tmp_path_factory.mktemp("stack")
    stack = Infra(folder)
    await stack.start()
    yield stack
    await stack.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def clean(infra: Infra) -> Endpoints:
    """The stack with no stream and an empty schema."""
    nc = await connect(infra.endpoints)
    for stream in STREAMS:
        try:
            await nc.jetstream(timeout=60).delete_stream(stream.name)
        except Exception as exc:
            assert "not found" in str(exc)  # noqa: PT017
    await nc.close()
    database = await asyncpg.connect(infra.endpoints.pg_dsn_admin)
    await database.execute("drop schema if exists scheduler cascade")
    await database.close()
    await prepare(infra.endpoints.pg_dsn_admin, {"scheduler": PASSWORD})
    return infra.endpoints


def settings(ends: Endpoints, **kw: Any) -> Settings:
    dsn = service_dsn(ends.pg_dsn_admin, "scheduler", PASSWORD)
    values: dict[str, Any] = {
        "silence_s": 60.0, "lost_grace_s": 60.0, "node_write_s": 0.5, "start_again_s": 1.0,
        "op_again_s": 1.0, "reconcile_s": 0.2, "view_refresh_s": 0.2, "topology_s": 2.0,
        "missing_s": 1.0, "wait_look_s": 0.1, "refused_again_s": 0.2, "resolve_s": 1.0,
    }  # fmt: skip
    return Settings(
        nats_url=ends.nats_url, nats_user="scheduler",
        nats_password=ends.nats_users["scheduler"], pg_dsn=dsn, redis_url=ends.redis_url,
        **{**values, **kw},
    )  # fmt: skip


class World:
    """Makes schedulers, edges and trainers, and ends them all."""

    def __init__(self, ends: Endpoints, infra: Infra) -> None:
        self.ends = ends
        self.infra = infra
        self._parts: list[Callable[[], Awaitable[None]]] = []
        self.apps: list[App] = []

    async def scheduler(self, **kw: Any) -> App:
        app = App(settings(self.ends, **kw))
        await app.start()
        self.apps.append(app)
        self._parts.append(app.close)
        return app

    async def edge(self, node: str, room: int = 1000, **beat: Any) -> SimEdge:
        """One that every scheduler knows: creates may go to it from now on."""
        edge = SimEdge(self.ends, node, room, **beat)
        await edge.start()
        self._parts.append(edge.stop)
        for app in self.apps:
            while not any(view.id == node for view in app.fleet.views()):
                await asyncio.sleep(0.02)
                await app.fleet.refresh()
        return edge

    async def trainer(self, project: str = "lab", *, hears: bool = True) -> Trainer:
        trainer = Trainer(self.ends, project, hears=hears)
        await trainer.start()
        self._parts.append(trainer.stop)
        return trainer

    def add(self, part: Callable[[], Awaitable[None]]) -> None:
        """Something more to end."""
        self._parts.append(part)

    def drop(self, part: Callable[[], Awaitable[None]]) -> None:
        """Something that the test has ended."""
        self._parts.remove(part)

    def forget(self, app: App) -> None:
        """The test has ended this scheduler itself."""
        self._parts.remove(app.close)
        self.apps.remove(app)

    async def close(self) -> None:
        for part in reversed(self._parts):
            async with asyncio.timeout(CLOSE_S):
                await part()

    async def sql(self, query: str, *args: Any) -> list[Any]:
        database = await asyncpg.connect(
            self.ends.pg_dsn_admin, server_settings={"search_path": "scheduler"}
        )
        try:
            return list(await database.fetch(query, *args))
        finally:
            await database.close()

    async def states(self) -> dict[str, int]:
        rows = await self.sql("select state, count(*) from sandbox group by state")
        return {r[0]: r[1] for r in rows}

    async def committed(self) -> dict[str, int]:
        rows = await self.sql("select id, committed_sandboxes from node")
        return {r[0]: r[1] for r in rows}


@pytest_asyncio.fixture(loop_scope="module")
async def world(clean: Endpoints, infra: Infra) -> AsyncIterator[World]:
    made = World(clean, infra)
    yield made
    await made.close()
