"""Schemas and roles: repeatable, safe twice at once, and what the code declares."""

from __future__ import annotations

import asyncio
import importlib
import re

import asyncpg
import pytest
from sqlalchemy import Connection, MetaData, text
from sqlalchemy.ext.asyncio import create_async_engine

from shared.migrate import ROOT, SERVICES, prepare
from tests.integration.conftest import PASSWORD, Stack, make_database

pytestmark = pytest.mark.integration

ALL = dict.fromkeys(SERVICES, PASSWORD)


@pytest.fixture
def fresh(stack: Stack) -> str:
    return stack.run(make_database(stack.endpoints.pg_dsn_admin))


async def test_migrating_is_repeatable_and_safe_twice_at_once(fresh: str) -> None:
    results = await asyncio.gather(*(prepare(fresh, ALL) for _ in range(3)))
    assert results[0] == results[1] == results[2]
    assert await prepare(fresh, ALL) == results[0]
    for service, dsn in results[0].items():
        connection = await asyncpg.connect(dsn)
        assert await connection.fetchval("select current_user") == f"dsec_{service}"
        await connection.close()


async def test_a_new_password_replaces_the_old_one(fresh: str) -> None:
    old = (await prepare(fresh, {"burst": "old 'quoted' :colon @at/%"}))["burst"]
    await (await asyncpg.connect(old)).close()
    new = (await prepare(fresh, {"burst": PASSWORD}))["burst"]
    with pytest.raises(asyncpg.InvalidPasswordError):
        await asyncpg.connect(old)
    await (await asyncpg.connect(new)).close()


async def test_a_service_reaches_no_other_services_tables(fresh: str) -> None:
    dsns = await prepare(fresh, ALL)
    connection = await asyncpg.connect(dsns["burst"])
    for table in ("audit.record", "scheduler.sandbox"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute(f"select 1 from {table}")
    await connection.execute("select 1 from burst.plan")
    await connection.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_the_revisions_make_what_the_tables_declare(fresh: str, service: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    await prepare(fresh, {service: PASSWORD})
    metadata: MetaData = importlib.import_module(f"services.{service}.tables").metadata
    engine = create_async_engine(fresh.replace("postgresql://", "postgresql+asyncpg://", 1))

    def compare(connection: Connection) -> list[object]:
        connection.execute(text(f"set search_path to {service}"))
        connection.dialect.default_schema_name = service
        context = MigrationContext.configure(
            connection, opts={"compare_type": False, "include_object": _ours}
        )
        return list(compare_metadata(context, metadata))

    async with engine.connect() as connection:
        assert await connection.run_sync(compare) == []
    await engine.dispose()


def _ours(_item: object, name: str | None, kind: str, reflected: bool, to: object) -> bool:
    # an index that no table declares is the revision's own business
    # a partition is no table of its own
    if kind == "table" and re.fullmatch(r"record_\d{8}", name or ""):
        return False
    return name != "alembic_version" and not (kind == "index" and reflected and to is None)


async def test_a_name_that_is_no_service_is_refused(fresh: str) -> None:
    with pytest.raises(ValueError, match="not a service"):
        await prepare(fresh, {"x; drop schema public": PASSWORD})


def test_every_service_with_tables_has_revisions() -> None:
    for service in SERVICES:
        assert list((ROOT / "services" / service / "migrations/versions").glob("*.py")), service
