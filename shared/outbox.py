"""Messages that must follow a state change: written in its transaction, sent after.

Owns: the outbox table's rows and their way to the bus. Delivery is at least once;
the message id makes the bus drop repetitions. A row is sent at once by the process
that wrote it; the sweep sends what a crash or an outage left. A row that the bus
refuses (an outage is no refusal) is tried again less and less often, and given up to
the dead letters in the end: the others flow on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    func,
    text,
)  # fmt: skip
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.bus import Bus, Outgoing
from shared.db import Database, fetch
from shared.errors import DsecError, Unavailable
from shared.stored import dead_letter

log = logging.getLogger(__name__)

_LAZY = text("set local synchronous_commit to off")

LETTERS = "outbox"
"""Where dead letters say that they come from."""
SWEEP_S = 1.0
SWEEP_AFTER_S = 3.0
"""Age at which a row is taken to be forgotten by its writer."""
SWEEP_ROWS = 500
SEND_ROWS = 1_000
"""Rows of one publication: as many as the bus surely stores within its deadline."""
DELETE_S = 0.2
"""How long the rows of what was sent may stay: one delete for many sendings."""
TRIES = 12
"""Refusals by the bus until a row is given up."""
PAUSE_S, PAUSE_MAX_S = 2.0, 60.0
"""Before a refused row is tried again, doubled each time up to the second: TRIES take
about eight minutes, longer than streams that were lost need to be declared again."""
CLOSE_S = 1.0
CLOSE_TRIES = 3
MAX_QUEUED = 50_000
"""Rows that may wait in memory; more are left to the sweep."""


def outbox_table(metadata: MetaData) -> Table:
    """The table to be declared in a service's ``tables``."""
    return Table(
        "outbox",
        metadata,
        Column("id", BigInteger, Identity(always=True), primary_key=True),
        Column("subject", String, nullable=False),
        Column("data", LargeBinary, nullable=False),
        Column("headers", Text),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
        Column("tries", Integer, nullable=False, server_default=text("0")),
        Column("next_at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    )


class Outbox:
    """One service's outbox. Use: ``rows = await outbox.add(connection, messages)``
    inside the transaction, ``outbox.sent_by_me(rows)`` after it."""

    def __init__(self, bus: Bus, db: Database) -> None:
        self._bus = bus
        self._db = db
        self._queue: list[tuple[int, Outgoing]] = []
        self._gone: list[int] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.given_up = 0
        """Rows that went to the dead letters since the start."""

    def start(self) -> None:
        """Begins sending and sweeping in the background."""
        self._tasks = [
            asyncio.create_task(self._send_loop(), name="outbox send"),
            asyncio.create_task(self._delete_loop(), name="outbox delete"),
            asyncio.create_task(self._sweep_loop(), name="outbox sweep"),
        ]

    async def close(self) -> None:
        """Ends; unsent rows stay for the next start."""
        tasks = set(self._tasks)
        for _ in range(CLOSE_TRIES):
            for task in tasks:
                task.cancel()
            if not tasks:
                break
            # a library on the way may turn a cancellation into an error: once more
            _, tasks = await asyncio.wait(tasks, timeout=CLOSE_S)
        with contextlib.suppress(DsecError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._delete_gone()

    async def add(
        self, connection: AsyncConnection, messages: Sequence[Outgoing]
    ) -> list[tuple[int, Outgoing]]:
        """Writes rows in the caller's transaction."""
        if not messages:
            return []
        for message in messages:
            self._bus.check_size(message)
        result = await fetch(
            connection,
            text(
                "insert into outbox (subject, data, headers) "
                "select s, d, h from unnest(cast(:s as text[]), cast(:d as bytea[]), "
                "cast(:h as text[])) with ordinality as t(s, d, h, n) order by n returning id"
            ),
            {
                "s": [m.subject for m in messages],
                "d": [m.data for m in messages],
                "h": [json.dumps(m.headers) if m.headers else None for m in messages],
            },
        )
        ids = sorted(row[0] for row in result)
        return list(zip(ids, messages, strict=True))

    def sent_by_me(self, rows: Sequence[tuple[int, Outgoing]]) -> None:
        """Hands committed rows to the sender."""
        if len(self._queue) + len(rows) > MAX_QUEUED:
            return
        self._queue.extend(rows)
        self._wake.set()

    async def _send_loop(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                rows, self._queue = self._queue[:SEND_ROWS], self._queue[SEND_ROWS:]
                await self._try_send(rows)

    async def _try_send(self, rows: Sequence[tuple[int, Outgoing]]) -> None:
        try:
            await self._send(rows)
        except DsecError as exc:
            log.warning("outbox: %d left to the sweep: %s", len(rows), exc.message)
        except Exception:
            log.exception("outbox: %d left to the sweep", len(rows))

    async def _send(self, rows: Sequence[tuple[int, Outgoing]]) -> None:
        stored, _ = await self._store(rows)
        self._gone += stored  # not across the await: the list may have been swapped by then

    async def _store(
        self, rows: Sequence[tuple[int, Outgoing]]
    ) -> tuple[list[int], dict[int, str]]:
        """The ids of the rows that are stored now, and why the bus refuses others."""
        whys = await self._bus.store_each([self._stamped(i, m) for i, m in rows])
        failed = [why.reason for why in whys if why]
        if failed:
            log.warning("outbox: %d left to the sweep: %s", len(failed), failed[0])
        found = list(zip(rows, whys, strict=True))
        refused = {i: why.reason for (i, _), why in found if why and why.refused}
        return [i for (i, _), why in found if why is None], refused

    async def _delete_loop(self) -> None:
        while True:
            await asyncio.sleep(DELETE_S)
            try:
                await self._delete_gone()
            except DsecError as exc:
                log.debug("outbox: %s", exc.message)
            except Exception:
                log.exception("outbox: sent rows were not deleted")

    async def _delete_gone(self) -> None:
        """Deletes what was sent. A row that a crash leaves is sent again by the sweep,
        and dropped by the bus: the commit need not wait for the disk."""
        if not self._gone:
            return
        ids, self._gone = self._gone, []
        try:
            async with self._db.transaction() as connection:
                await connection.execute(_LAZY)
                await self._delete(connection, ids)
        except BaseException:
            self._gone += ids
            raise

    def _stamped(self, row: int, message: Outgoing) -> Outgoing:
        # with the content: a database that starts anew counts its rows anew, and the
        # bus would take its messages for repetitions
        content = hashlib.blake2b(message.subject.encode() + message.data, digest_size=8)
        msg_id = f"{self._db.schema}-{row}-{content.hexdigest()}"
        return Outgoing(message.subject, message.data, message.headers, msg_id)

    async def _delete(self, connection: AsyncConnection, ids: list[int]) -> None:
        await connection.execute(
            text("delete from outbox where id = any(cast(:ids as bigint[]))"), {"ids": ids}
        )

    async def _sweep_loop(self) -> None:
        while True:
            try:
                while await self.sweep() == SWEEP_ROWS:
                    pass
            except Unavailable as exc:
                log.debug("outbox sweep: %s", exc.message)
            except Exception:
                log.exception("outbox sweep")
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Sends forgotten rows, oldest first; returns how many were sent."""
        async with self._db.transaction() as connection:
            result = await connection.execute(
                text(
                    "select id, subject, data, headers, tries from outbox "
                    "where at < now() - make_interval(secs => :age) and next_at <= now() "
                    "order by id limit :n for update skip locked"
                ),
                {"age": SWEEP_AFTER_S, "n": SWEEP_ROWS},
            )
            found = [
                (i, Outgoing(subject, bytes(data), json.loads(headers) if headers else {}), tries)
                for i, subject, data, headers, tries in result
            ]
            if not found:
                return 0
            stored, refused = await self._store([(i, m) for i, m, _ in found])
            hopeless = [(i, m, n) for i, m, n in found if i in refused and n + 1 >= TRIES]
            gone = await self._give_up(hopeless, refused)
            if stored or gone:
                await self._delete(connection, [*stored, *gone])
            await self._put_off(connection, sorted(refused.keys() - set(gone)))
        return len(stored)

    async def _put_off(self, connection: AsyncConnection, ids: list[int]) -> None:
        if ids:
            await connection.execute(
                text(
                    "update outbox set tries = tries + 1, next_at = now() + make_interval("
                    "secs => least(:most, :pause * power(2, least(tries, 30)))) "
                    "where id = any(cast(:ids as bigint[]))"
                ),
                {"ids": ids, "pause": PAUSE_S, "most": PAUSE_MAX_S},
            )

    async def _give_up(
        self, rows: Sequence[tuple[int, Outgoing, int]], refused: Mapping[int, str]
    ) -> list[int]:
        """Stores rows as dead letters; returns the ids of those that are."""
        letters = [
            (
                i,
                dead_letter(
                    m.subject, m.data, stream=LETTERS, durable=self._db.schema, seq=i,
                    deliveries=n + 1, cause=refused[i],
                ),
            )
            for i, m, n in rows
        ]  # fmt: skip
        if not letters:
            return []
        gone, _ = await self._store(letters)
        for i, m, n in rows:
            if i in gone:
                log.error("outbox: %s given up after %d tries: %s", m.subject, n + 1, refused[i])
        self.given_up += len(gone)
        return gone
