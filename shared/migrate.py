"""Schemas and roles: one of each a service, brought to their newest revision.

Owns: roles, schemas, running a service's revisions through Alembic. Does not own:
the revisions (``services/<name>/migrations``). Run by whoever holds the admin DSN:
``python -m shared.migrate`` with ``DSEC_PG_ADMIN_DSN`` and, for each service,
``DSEC_PG_PASSWORD_<SERVICE>``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

if TYPE_CHECKING:
    from sqlalchemy import Connection

SERVICES = ("auth", "scheduler", "imagesvc", "audit", "burst")
LOCK = 0x64736563  # "dsec": one migration at a time, whoever runs it
ROOT = Path(__file__).resolve().parent.parent


def service_dsn(admin_dsn: str, service: str, password: str) -> str:
    """The DSN of a service's own role in the admin DSN's database."""
    parts = urlsplit(admin_dsn)
    host = parts.netloc.rpartition("@")[2]
    netloc = f"dsec_{service}:{quote(password, safe='')}@{host}"
    return urlunsplit((parts.scheme, netloc, parts.path, parts.query, ""))


async def prepare(admin_dsn: str, passwords: Mapping[str, str]) -> dict[str, str]:
    """Makes or updates role, schema and tables of every service in ``passwords``;
    returns their DSNs. Safe to repeat and to run twice at once."""
    from sqlalchemy import pool, text  # not at the top: who only wants DSNs stays small
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(
        admin_dsn.replace("postgresql://", "postgresql+asyncpg://", 1), poolclass=pool.NullPool
    )
    try:
        async with engine.begin() as connection:
            await connection.execute(text("select pg_advisory_xact_lock(:k)"), {"k": LOCK})
            for service, password in passwords.items():
                await connection.run_sync(_prepare_one, service, password)
    finally:
        await engine.dispose()
    return {s: service_dsn(admin_dsn, s, p) for s, p in passwords.items()}


def _prepare_one(connection: Connection, service: str, password: str) -> None:
    from sqlalchemy import text

    if not service.isidentifier():
        raise ValueError(f"{service!r} is not a service name")
    role = f"dsec_{service}"
    known = connection.execute(
        text("select 1 from pg_roles where rolname = :r"), {"r": role}
    ).scalar()
    literal = connection.execute(text("select quote_literal(:p)"), {"p": password}).scalar()
    verb = "alter" if known else "create"
    connection.execute(text(f"{verb} role {role} login password {literal}".replace(":", "\\:")))
    connection.execute(text(f"create schema if not exists {service}"))
    connection.execute(text(f"grant usage, create on schema {service} to {role}"))
    # defaults, not grants after the fact: a revision may take some of them back
    for kind in ("tables", "sequences"):
        connection.execute(
            text(f"alter default privileges in schema {service} grant all on {kind} to {role}")
        )
    connection.execute(text(f"set local search_path to {service}"))
    _upgrade(connection, service)


def _upgrade(connection: Connection, service: str) -> None:
    from alembic.config import Config
    from alembic.runtime.environment import EnvironmentContext
    from alembic.script import ScriptDirectory

    location = ROOT / "services" / service / "migrations"
    if not location.is_dir():
        return
    config = Config()
    config.set_main_option("script_location", str(location).replace("%", "%%"))
    script = ScriptDirectory.from_config(config)

    def steps(revision: str, _context: object) -> object:
        return script._upgrade_revs("head", revision)

    with EnvironmentContext(config, script, fn=steps) as environment:
        environment.configure(connection=connection, version_table_schema=service)
        environment.run_migrations()


def main() -> None:
    """Prepares every service whose password the environment names."""
    names = {s: os.environ.get(f"DSEC_PG_PASSWORD_{s.upper()}") for s in SERVICES}
    passwords = {s: p for s, p in names.items() if p}
    asyncio.run(prepare(os.environ["DSEC_PG_ADMIN_DSN"], passwords))
    print("prepared:", ", ".join(passwords))


if __name__ == "__main__":
    main()
