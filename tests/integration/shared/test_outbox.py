"""The outbox: what was committed reaches the bus once, whatever ends in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest

from schemas.base import decode
from schemas.bus import DeadLetter
from schemas.streams import Durable
from shared.bus import Bus, Outgoing
from shared.db import Database
from shared.errors import InvalidRequest
from shared.outbox import SWEEP_AFTER_S, Outbox
from tests.integration.conftest import Stack
from tests.integration.shared.streams import make_durable

pytestmark = pytest.mark.integration

HOUR_S = 3600.0
"""Longer than any test."""


@pytest.fixture
async def dsn(dsn_of: Callable[[str], str], admin_dsn: str) -> str:
    made = dsn_of("burst")  # any schema with an outbox
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute("truncate burst.outbox")
    await admin.close()
    return made


@pytest.fixture
async def db(dsn: str) -> AsyncIterator[Database]:
    made = Database(dsn, "burst")
    yield made
    await made.close()


async def write(outbox: Outbox, db: Database, messages: list[Outgoing]) -> list:
    async with db.transaction() as connection:
        return await outbox.add(connection, messages)


async def left(dsn: str) -> int:
    connection = await asyncpg.connect(dsn)
    try:
        return int(await connection.fetchval("select count(*) from burst.outbox"))
    finally:
        await connection.close()


async def age(dsn: str, by_s: float = SWEEP_AFTER_S + 1) -> None:
    """Makes all rows old enough for the sweep."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("update burst.outbox set at = at - make_interval(secs => $1)", by_s)
    await connection.close()


async def stored(bus: Bus, durable: Durable) -> int:
    return int((await bus.js.stream_info(durable.stream)).state.messages)


async def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():  # type: ignore[misc]
            await asyncio.sleep(0.02)


def some(durable: Durable, count: int) -> list[Outgoing]:
    return [Outgoing(durable.filters[0], f"m{i}".encode(), {"k": f"v{i}"}) for i in range(count)]


async def test_committed_messages_are_sent_in_order_with_headers_and_forgotten(
    bus: Bus, db: Database, dsn: str
) -> None:
    durable = await make_durable(bus)
    outbox = Outbox(bus, db)
    outbox.start()
    outbox.sent_by_me(await write(outbox, db, some(durable, 50)))

    async def gone() -> bool:
        return await left(dsn) == 0

    await eventually(gone)
    await outbox.close()
    sub = await bus.js.pull_subscribe_bind(durable=durable.name, stream=durable.stream)
    got = await sub.fetch(50, timeout=60)
    assert [m.data for m in got] == [f"m{i}".encode() for i in range(50)]
    assert [(m.headers or {})["k"] for m in got] == [f"v{i}" for i in range(50)]


async def test_a_crash_after_the_commit_loses_nothing(
    bus: Bus, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer dies between commit and sending: another process' sweep sends."""
    monkeypatch.setattr("shared.outbox.SWEEP_AFTER_S", HOUR_S)
    durable = await make_durable(bus)
    await write(Outbox(bus, db), db, some(durable, 10))
    survivor = Outbox(bus, db)
    assert await survivor.sweep() == 0, "young rows belong to their writer"
    await age(dsn, HOUR_S + 1)
    assert await survivor.sweep() == 10
    assert (await stored(bus, durable), await left(dsn)) == (10, 0)


async def test_a_crash_after_sending_repeats_nothing(bus: Bus, db: Database, dsn: str) -> None:
    """The writer dies between sending and deleting: the bus drops the repetition."""
    durable = await make_durable(bus)
    outbox = Outbox(bus, db)
    rows = await write(outbox, db, some(durable, 10))
    await outbox._store(rows)
    assert (await stored(bus, durable), await left(dsn)) == (10, 10)
    await age(dsn)
    assert await Outbox(bus, db).sweep() == 10
    assert (await stored(bus, durable), await left(dsn)) == (10, 0)


async def test_a_rollback_sends_nothing(bus: Bus, db: Database, dsn: str) -> None:
    durable = await make_durable(bus)
    outbox = Outbox(bus, db)
    with pytest.raises(ZeroDivisionError):
        async with db.transaction() as connection:
            await outbox.add(connection, some(durable, 3))
            raise ZeroDivisionError
    await age(dsn)
    assert await outbox.sweep() == 0
    assert await stored(bus, durable) == 0


async def test_two_sweeps_at_once_share_the_rows(bus: Bus, db: Database, dsn: str) -> None:
    durable = await make_durable(bus)
    await write(Outbox(bus, db), db, some(durable, 200))
    await age(dsn)
    other = Database(dsn, "burst")
    counts = await asyncio.gather(*(Outbox(bus, d).sweep() for d in (db, other)))
    assert sum(counts) == 200
    assert (await stored(bus, durable), await left(dsn)) == (200, 0)
    await other.close()


async def test_a_message_that_no_stream_takes_does_not_hold_up_or_repeat_its_neighbours(
    bus: Bus, db: Database, dsn: str
) -> None:
    durable = await make_durable(bus)
    messages = [*some(durable, 5), Outgoing("no.such.stream", b"x")]
    await write(Outbox(bus, db), db, messages)
    await age(dsn)
    assert await Outbox(bus, db).sweep() == 5
    assert (await stored(bus, durable), await left(dsn)) == (5, 1)


async def try_now(dsn: str) -> None:
    """Rows that were put off are due."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("update burst.outbox set next_at = now()")
    await connection.close()


async def test_refused_rows_are_given_up_in_the_end_and_others_pass_them(
    bus: Bus, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """More of them than one sweep takes, and older than everything else."""
    monkeypatch.setattr("shared.outbox.SWEEP_ROWS", 5)
    monkeypatch.setattr("shared.outbox.TRIES", 3)
    monkeypatch.setattr("shared.outbox.PAUSE_S", HOUR_S)
    monkeypatch.setattr("shared.outbox.PAUSE_MAX_S", HOUR_S)
    dead = await make_durable(bus)
    monkeypatch.setattr("shared.stored.dlq", lambda _: dead.filters[0])
    durable = await make_durable(bus)
    outbox = Outbox(bus, db)
    await write(outbox, db, [Outgoing(f"no.such.stream{i}", b"x%d" % i) for i in range(7)])
    await write(outbox, db, some(durable, 5))
    await age(dsn)
    assert [await outbox.sweep() for _ in range(4)] == [0, 3, 2, 0]  # put off: not in the way
    assert (await stored(bus, durable), await left(dsn)) == (5, 7)
    for _ in range(2):
        await try_now(dsn)
        await outbox.sweep()
        await outbox.sweep()
    assert (await left(dsn), outbox.given_up) == (0, 7)
    assert sum("given up" in r.message for r in caplog.records if r.levelname == "ERROR") == 7
    sub = await bus.js.pull_subscribe_bind(durable=dead.name, stream=dead.stream)
    letters = [decode(m.data, DeadLetter) for m in await sub.fetch(7, timeout=60)]
    assert {m.subject for m in letters} == {f"no.such.stream{i}" for i in range(7)}
    assert {m.body for m in letters} == {b"x%d" % i for i in range(7)}
    assert {(m.stream, m.durable, m.deliveries) for m in letters} == {("outbox", "burst", 3)}
    assert letters[0].cause == "no stream takes the subject"


async def test_a_bus_that_is_away_is_no_refusal(
    bus: Bus, stack: Stack, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.outbox.TRIES", 1)
    durable = await make_durable(bus)
    gone = Bus(stack.settings(), "test")
    outbox = Outbox(gone, db)
    await gone.start()
    rows = some(durable, 2)
    await write(outbox, db, rows)
    await gone.close()
    await age(dsn)
    assert await outbox.sweep() == 0
    assert (await left(dsn), outbox.given_up) == (2, 0)
    assert await Outbox(bus, db).sweep() == 2


async def test_one_that_has_become_too_large_does_not_hold_up_its_neighbours(
    bus: Bus, db: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    durable = await make_durable(bus)
    subject = durable.filters[0]
    await write(Outbox(bus, db), db, [Outgoing(subject, b"x" * 10_000), Outgoing(subject, b"x")])
    await age(dsn)
    monkeypatch.setattr(bus.client, "_max_payload", 8_000)
    assert await Outbox(bus, db).sweep() == 1
    assert (await stored(bus, durable), await left(dsn)) == (1, 1)


async def test_a_database_that_starts_anew_is_not_taken_for_a_repetition(
    bus: Bus, db: Database, dsn: str, admin_dsn: str
) -> None:
    """Row numbers begin again; the messages are others and must be stored."""
    durable = await make_durable(bus)
    for content in (b"before", b"after"):
        admin = await asyncpg.connect(admin_dsn)
        await admin.execute("truncate burst.outbox restart identity")
        await admin.close()
        await write(Outbox(bus, db), db, [Outgoing(durable.filters[0], content)])
        await age(dsn)
        assert await Outbox(bus, db).sweep() == 1
    assert await stored(bus, durable) == 2


async def test_an_oversized_message_is_refused_before_it_is_written(
    bus: Bus, db: Database, dsn: str
) -> None:
    with pytest.raises(InvalidRequest):
        await write(Outbox(bus, db), db, [Outgoing("x", b"x" * (bus.client.max_payload + 1))])
    assert await left(dsn) == 0


async def test_an_outage_of_the_bus_only_delays(own_stack: Stack) -> None:
    """Rows written while the server is away are sent when it is back, without a push."""
    from tests.integration.conftest import PASSWORD, prepare

    dsn = (await own_stack.do(prepare(own_stack.endpoints.pg_dsn_admin, {"burst": PASSWORD})))[
        "burst"
    ]
    bus, db = Bus(own_stack.settings(), "test"), Database(dsn, "burst")
    await bus.start()
    durable = await make_durable(bus)
    outbox = Outbox(bus, db)
    outbox.start()
    await own_stack.do(own_stack.infra.kill("nats"))
    outbox.sent_by_me(await write(outbox, db, some(durable, 10)))
    await asyncio.sleep(0.5)
    assert await left(dsn) == 10
    await own_stack.do(own_stack.infra.restart("nats"))

    async def gone() -> bool:
        return await left(dsn) == 0

    await eventually(gone)
    assert await stored(bus, durable) == 10
    await outbox.close()
    await bus.close()
    await db.close()
