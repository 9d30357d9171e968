"""Postgres: one engine a service, transactions with deadlines, a bounded close.

Owns: connections, the pool's bounds, translation of an unreachable or overloaded
database to ``Unavailable``. Does not own: any SQL of a service (its ``store``),
nor schema changes (:mod:`shared.migrate`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from shared.errors import Unavailable


@dataclass(frozen=True)
class DbLimits:
    """Bounds of the pool and of each statement, in connections and seconds."""

    pool_size: int = 6
    acquire_s: float = 5.0
    statement_s: float = 20.0
    connect_s: float = 5.0
    close_s: float = 5.0


class Database:
    """A service's access to its schema. ``dsn`` is ``postgresql://…`` of its role."""

    def __init__(self, dsn: str, schema: str, limits: DbLimits | None = None) -> None:
        self.schema = schema
        self.limits = limits or DbLimits()
        url = dsn.replace("postgresql://", "postgresql+asyncpg://", 1)
        self._engine: AsyncEngine = create_async_engine(
            url,
            pool_size=self.limits.pool_size,
            max_overflow=0,
            pool_timeout=self.limits.acquire_s,
            pool_recycle=1800,
            connect_args={
                "timeout": self.limits.connect_s,
                "command_timeout": self.limits.statement_s,
                "server_settings": {
                    "search_path": schema,
                    "application_name": f"dsec-{schema}",
                    "jit": "off",
                },
            },
        )

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One transaction, committed at the end of the block. Raises ``Unavailable``
        where no connection is free in time or the server is gone."""
        try:
            async with self._engine.begin() as connection:
                yield connection
        except (PoolTimeout, InterfaceError, OperationalError, OSError, TimeoutError) as exc:
            raise Unavailable(f"database: {type(exc).__name__}") from exc
        except DBAPIError as exc:
            if exc.connection_invalidated or _is_outage(exc):
                raise Unavailable(f"database: {type(exc.orig).__name__}") from exc
            raise

    async def ping(self) -> None:
        """Raises ``Unavailable`` when the database does not answer."""
        async with self.transaction() as connection:
            await connection.execute(text("select 1"))

    async def close(self) -> None:
        """Closes the pool; connections that do not close in time are abandoned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.close_s):
                await self._engine.dispose()


# class 57: shutdown, crash, cannot connect now; 53: too many connections; 40: retry
_OUTAGE = ("08", "53", "57", "40")


def _is_outage(exc: DBAPIError) -> bool:
    state = getattr(exc.orig, "sqlstate", None) or getattr(exc.orig, "pgcode", None) or ""
    return str(state).startswith(_OUTAGE)
