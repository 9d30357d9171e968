"""Recomputes the chain and says where it breaks.

Owns: the judgement over stored entries. A broken chain is evidence of tampering;
an intact one proves nothing about someone who rewrote everything from one entry to
the head: compare the printed head with one noted elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.audit.chain import GENESIS, link
from services.audit.records import row
from services.audit.settings import Settings
from services.audit.store import Entry, Head, Store
from shared.db import Database
from shared.errors import DsecError


@dataclass(frozen=True)
class Verdict:
    """``broken_at`` is the number of the first entry that is wrong, ``None`` where
    all are right; ``count`` and ``hash`` describe the part that is right."""

    count: int
    hash: bytes
    broken_at: int | None = None
    reason: str = ""


def fault(entry: Entry, seq: int, previous: bytes) -> str | None:
    """What is wrong with the entry that should be number ``seq``."""
    if entry.seq != seq:
        return f"entry {seq} is missing"
    if entry.prev != previous:
        return "it does not follow the entry before it"
    if entry.hash != link(previous, seq, entry.row.kind, entry.row.record):
        return "its content was changed"
    if row(entry.row.kind, entry.row.record) != entry.row:
        return "its columns differ from its content"
    return None


async def verify(entries: AsyncIterator[Entry], head: Head) -> Verdict:
    """Follows the chain up to ``head``."""
    seq, previous = 0, GENESIS
    async for entry in entries:
        if seq == head.seq:
            break  # appended since the head was read
        reason = fault(entry, seq + 1, previous)
        if reason:
            return Verdict(seq, previous, seq + 1, reason)
        seq, previous = entry.seq, entry.hash
    if seq < head.seq:
        return Verdict(seq, previous, seq + 1, f"the record ends here, its head is {head.seq}")
    if previous != head.hash:
        return Verdict(seq, previous, seq, "the head's hash is another")
    return Verdict(seq, previous)


async def _verify(settings: Settings) -> Verdict:
    db = Database(settings.pg_dsn, "audit")
    try:
        store = Store(db)
        head = await store.head()
        return await verify(store.entries(), head)
    finally:
        await db.close()


def run(settings: Settings) -> int:
    """Prints the verdict; 0 where the chain holds, 1 where it breaks, 2 unread."""
    try:
        verdict = asyncio.run(_verify(settings))
    except DsecError as exc:
        print(f"audit: {exc.message}", file=sys.stderr)
        return 2
    if verdict.broken_at is not None:
        print(f"broken at {verdict.broken_at}: {verdict.reason}")
        return 1
    print(f"intact: {verdict.count} entries, head {verdict.hash.hex()}")
    return 0
