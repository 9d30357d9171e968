"""Which messages a service has already handled: idempotency for those whose effect
is not a compare-and-swap of its own. A row goes in with the effect's transaction."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import BigInteger, Column, DateTime, MetaData, String, Table, func, text
from sqlalchemy.ext.asyncio import AsyncConnection

KEEP_S = 48 * 3600
"""Longer than any stream keeps a message that could come again."""


def inbox_table(metadata: MetaData) -> Table:
    """The table to be declared in a service's ``tables``."""
    return Table(
        "inbox",
        metadata,
        Column("consumer", String, primary_key=True),
        Column("stream_seq", BigInteger, primary_key=True),
        Column("at", DateTime(timezone=True), nullable=False, server_default=func.now()),
    )


async def fresh(
    connection: AsyncConnection, consumer: str, sequences: Sequence[int]
) -> frozenset[int]:
    """Those of ``sequences`` seen for the first time; marks them as seen."""
    rows = await connection.execute(
        text(
            "insert into inbox (consumer, stream_seq) "
            "select :consumer, unnest(cast(:seqs as bigint[])) "
            "on conflict do nothing returning stream_seq"
        ),
        {"consumer": consumer, "seqs": sorted(set(sequences))},
    )
    return frozenset(row[0] for row in rows)


async def prune(connection: AsyncConnection, *, limit: int) -> int:
    """Removes rows past their use, at most ``limit``; returns how many."""
    result = await connection.execute(
        text(
            "delete from inbox where (consumer, stream_seq) in (select consumer, stream_seq "
            "from inbox where at < now() - make_interval(secs => :keep) limit :n "
            "for update skip locked)"
        ),
        {"keep": KEEP_S, "n": limit},
    )
    return result.rowcount
