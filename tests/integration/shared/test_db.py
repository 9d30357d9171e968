"""The database layer: deadlines, cancellation, a close that ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import asyncpg
import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from shared.db import Database, DbLimits, fetch
from shared.errors import Unavailable
from tests.integration.conftest import Stack

pytestmark = pytest.mark.integration

LIMITS = DbLimits(pool_size=2, acquire_s=60.0, statement_s=60.0, connect_s=60.0, close_s=2.0)


@pytest.fixture
async def db(dsn_of: Callable[[str], str]) -> AsyncIterator[Database]:
    made = Database(dsn_of("burst"), "burst", LIMITS)
    yield made
    await made.close()


async def sleep(db: Database, seconds: float) -> None:
    async with db.transaction() as connection:
        await connection.execute(text("select pg_sleep(:s)"), {"s": seconds})


async def held(db: Database, count: int) -> list[asyncio.Task[None]]:
    """``count`` connections in use."""
    tasks = [asyncio.create_task(sleep(db, 20.0)) for _ in range(count)]
    await asyncio.sleep(0.3)
    return tasks


async def test_a_cancel_inside_a_query_and_inside_acquire_leaves_the_pool_whole(
    db: Database,
) -> None:
    """(T07)"""
    for _ in range(5):
        inside = await held(db, 2)
        waiting = asyncio.create_task(db.ping())
        await asyncio.sleep(0.05)
        for task in (waiting, *inside):
            task.cancel()
        results = await asyncio.gather(waiting, *inside, return_exceptions=True)
        assert all(isinstance(r, asyncio.CancelledError) for r in results)
    await asyncio.gather(*(sleep(db, 0.05) for _ in range(4)))


async def test_a_close_is_bounded_while_queries_run(dsn_of: Callable[[str], str]) -> None:
    """(T07)"""
    db = Database(dsn_of("burst"), "burst", LIMITS)
    tasks = [asyncio.create_task(sleep(db, 100)) for _ in range(2)]
    await asyncio.sleep(0.3)
    async with asyncio.timeout(LIMITS.close_s + 30):
        await db.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_caller_that_gets_no_connection_in_time_is_told(
    dsn_of: Callable[[str], str],
) -> None:
    """(T08)"""
    db = Database(dsn_of("burst"), "burst", replace(LIMITS, acquire_s=1.0))
    free = asyncio.Event()
    held = asyncio.Semaphore(0)

    async def hold() -> None:
        async with db.transaction():
            held.release()
            await free.wait()

    tasks = [asyncio.create_task(hold()) for _ in range(LIMITS.pool_size)]
    async with asyncio.timeout(60):
        for _ in tasks:
            await held.acquire()
    with pytest.raises(Unavailable) as caught:
        await db.ping()
    assert caught.value.retryable
    free.set()
    await asyncio.gather(*tasks)
    await db.ping()
    await db.close()


async def test_many_workers_on_few_connections_all_get_their_turn(
    dsn_of: Callable[[str], str],
) -> None:
    """(T08) 100 workers, ten short transactions each: none waits past its deadline."""
    db = Database(dsn_of("burst"), "burst", DbLimits(pool_size=3, acquire_s=60))

    async def worker() -> None:
        for _ in range(10):
            await db.ping()

    async with asyncio.timeout(120):
        await asyncio.gather(*(worker() for _ in range(100)))
    await db.close()


async def test_a_statement_past_its_deadline_is_an_outage_and_frees_its_connection(
    dsn_of: Callable[[str], str],
) -> None:
    db = Database(dsn_of("burst"), "burst", replace(LIMITS, statement_s=7.0))
    with pytest.raises(Unavailable):
        await sleep(db, 50)
    await asyncio.gather(*(sleep(db, 0.05) for _ in range(4)))
    await db.close()


async def test_a_mistake_in_sql_is_not_taken_for_an_outage(db: Database) -> None:
    with pytest.raises(DBAPIError):
        async with db.transaction() as connection:
            await connection.execute(text("select no_such_column"))
    with pytest.raises(DBAPIError):
        async with db.transaction() as connection:
            await connection.execute(text("insert into plan (bursting) values (true)"))


async def test_a_serialisation_failure_is_retryable(db: Database) -> None:
    with pytest.raises(Unavailable):
        async with db.transaction() as connection:
            await connection.execute(
                text("do $$ begin raise exception 'x' using errcode = '40001'; end $$")
            )


async def test_an_error_inside_the_block_rolls_back(db: Database) -> None:
    with pytest.raises(ZeroDivisionError):
        async with db.transaction() as connection:
            await connection.execute(
                text("insert into outbox (subject, data) values ('rollback', '')")
            )
            raise ZeroDivisionError
    async with db.transaction() as connection:
        found = await connection.execute(
            text("select count(*) from outbox where subject = 'rollback'")
        )
        assert found.scalar() == 0


async def test_the_database_may_go_and_come_back(own_stack: Stack) -> None:
    from tests.integration.conftest import PASSWORD, prepare

    dsns = await own_stack.do(prepare(own_stack.endpoints.pg_dsn_admin, {"burst": PASSWORD}))
    db = Database(dsns["burst"], "burst", LIMITS)
    await asyncio.gather(db.ping(), db.ping())
    await own_stack.do(own_stack.infra.kill("postgres"))
    for _ in range(3):
        with pytest.raises(Unavailable):
            await db.ping()
    await own_stack.do(own_stack.infra.restart("postgres"))
    async with asyncio.timeout(60):
        while True:
            try:
                await db.ping()
                break
            except Unavailable:
                await asyncio.sleep(0.05)
    await db.close()


@pytest.mark.parametrize("given", [{"n": [2**63]}, {"t": ["a\0"]}])
async def test_a_value_that_no_column_takes_is_no_outage(
    db: Database, given: dict[str, list[object]]
) -> None:
    """An outage would have its message come again for ever."""
    values = {"n": [1], "t": ["a"]} | given
    statement = text("select * from unnest(cast(:n as bigint[]), cast(:t as text[]))")
    with pytest.raises(DBAPIError):
        async with db.transaction() as connection:
            await connection.execute(statement, values)
    with pytest.raises(asyncpg.PostgresError):
        async with db.transaction() as connection:
            await fetch(connection, statement, values)
    await db.ping()
