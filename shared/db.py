"""Postgres: one engine a service, transactions with deadlines, a bounded close.

Owns: connections, the pool's bounds, translation of an unreachable or overloaded
database to ``Unavailable``. Does not own: any SQL of a service (its ``store``),
nor schema changes (:mod:`shared.migrate`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import asyncpg
from sqlalchemy import TextClause, text
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
            isolation_level="AUTOCOMMIT",  # transactions are the driver's: both ways share them
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
            async with self._engine.connect() as connection, _transacting(connection):
                yield connection
        except (PoolTimeout, *_CLIENT_SIDE, OSError, TimeoutError) as exc:
            raise Unavailable(f"database: {type(exc).__name__}") from exc
        except asyncpg.PostgresError as exc:
            if str(exc.sqlstate).startswith(_OUTAGE):
                raise Unavailable(f"database: {type(exc).__name__}") from exc
            raise
        except DBAPIError as exc:
            if exc.connection_invalidated or _is_outage(exc):
                raise Unavailable(f"database: {type(exc.orig).__name__}") from exc
            raise

    def portion(
        self, work: Callable[[AsyncConnection], Awaitable[int]]
    ) -> Callable[[], Awaitable[int]]:
        """``work`` as a transaction of its own each time it is called."""

        async def once() -> int:
            async with self.transaction() as connection:
                return await work(connection)

        return once

    async def ping(self) -> None:
        """Raises ``Unavailable`` when the database does not answer."""
        async with self.transaction() as connection:
            await connection.execute(text("select 1"))

    async def close(self) -> None:
        """Closes the pool; connections that do not close in time are abandoned."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.limits.close_s):
                await self._engine.dispose()


@contextlib.asynccontextmanager
async def _transacting(connection: AsyncConnection) -> AsyncIterator[None]:
    driver = await _driver(connection)
    if driver.is_closed():  # the server went while it was in the pool
        await connection.invalidate()
        driver = await _driver(connection)
    transaction = driver.transaction()
    try:
        await transaction.start()
        yield
        await transaction.commit()
    except asyncpg.InternalClientError:
        driver.terminate()  # out of step with the server
        raise
    except Exception:
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await transaction.rollback()
        raise
    except BaseException:
        driver.terminate()  # cancelled inside a statement, perhaps: nobody knows its state
        raise
    finally:
        if driver.is_closed():  # the pool must not hand it out again
            await connection.invalidate()


async def _driver(connection: AsyncConnection) -> asyncpg.Connection:
    return (await connection.get_raw_connection()).driver_connection


async def fetch(
    connection: AsyncConnection, statement: TextClause, parameters: Mapping[str, Any] | None = None
) -> list[asyncpg.Record]:
    """All rows of a statement, past SQLAlchemy's result machinery: a third of its cost.
    For the statements of hot paths; parameters are typed by casts in the statement."""
    query, names = _positional(statement.text)
    driver = await _driver(connection)
    values = parameters or {}
    rows: list[asyncpg.Record] = await driver.fetch(query, *[values[name] for name in names])
    return rows


async def execute(connection: AsyncConnection, command: str) -> None:
    """A command without parameters or rows, past SQLAlchemy's machinery: its savepoints cost
    the client a millisecond."""
    await (await _driver(connection)).execute(command)


async def copy(
    connection: AsyncConnection, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Inserts rows by COPY: about half the server's work of an insert from arrays. Values
    are those of the driver for the columns' types, ``jsonb`` as text."""
    driver = await _driver(connection)
    await driver.copy_records_to_table(table, columns=columns, records=rows)


_PARAMETER = re.compile(r"(?<![:\\\w]):([a-z_]\w*)")


@lru_cache(maxsize=1024)
def _positional(sql: str) -> tuple[str, tuple[str, ...]]:
    """The statement with ``$1`` … for its named parameters, and their names."""
    names: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return names.setdefault(match[1], f"${len(names) + 1}")

    return _PARAMETER.sub(number, sql), tuple(names)


_CLIENT_SIDE = (asyncpg.InterfaceError, asyncpg.InternalClientError)
# class 57: shutdown, crash, cannot connect now; 53: too many connections; 40: retry
_OUTAGE = ("08", "53", "57", "40")


def _is_outage(exc: DBAPIError) -> bool:
    if isinstance(exc, InterfaceError | OperationalError):
        return True
    state = getattr(exc.orig, "sqlstate", None) or getattr(exc.orig, "pgcode", None) or ""
    return str(state).startswith(_OUTAGE)
