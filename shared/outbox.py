"""Messages that must follow a state change: written in its transaction, sent after.

Owns: the outbox table's rows and their way to the bus. Delivery is at least once;
the message id makes the bus drop repetitions. A row is sent at once by the process
that wrote it; the sweep sends what a crash or an outage left.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from collections.abc import Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Identity,
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

log = logging.getLogger(__name__)

_LAZY = text("set local synchronous_commit to off")

SWEEP_S = 1.0
SWEEP_AFTER_S = 3.0
"""Age at which a row is taken to be forgotten by its writer."""
SWEEP_ROWS = 500
SEND_ROWS = 1_000
"""Rows of one publication: as many as the bus surely stores within its deadline."""
DELETE_S = 0.2
"""How long the rows of what was sent may stay: one delete for many sendings."""
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
        stored = await self._store(rows)
        self._gone += stored  # not across the await: the list may have been swapped by then

    async def _store(self, rows: Sequence[tuple[int, Outgoing]]) -> list[int]:
        """The ids of the rows that are stored now."""
        reasons = await self._bus.store_each([self._stamped(i, m) for i, m in rows])
        failed = [reason for reason in reasons if reason]
        if failed:
            log.warning("outbox: %d left to the sweep: %s", len(failed), failed[0])
        return [i for (i, _), reason in zip(rows, reasons, strict=True) if reason is None]

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
                    "select id, subject, data, headers from outbox "
                    "where at < now() - make_interval(secs => :age) "
                    "order by id limit :n for update skip locked"
                ),
                {"age": SWEEP_AFTER_S, "n": SWEEP_ROWS},
            )
            rows = [(i, Outgoing(s, bytes(d), json.loads(h) if h else {})) for i, s, d, h in result]
            stored = await self._store(rows) if rows else []
            if stored:
                await self._delete(connection, stored)
        return len(stored)
