"""Recomputes the chain and says where it breaks.

Owns: the judgement over stored entries. A broken chain is evidence of tampering;
an intact one proves nothing about someone who rewrote everything from one entry to
the head: compare the printed head with one noted elsewhere.

Days that are older than they are kept are gone; what is left begins behind the anchor,
the last of them. That they went by rule is itself an entry of the chain.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.audit.chain import GENESIS, canonical, link
from services.audit.records import RETENTION, row
from services.audit.settings import Settings
from services.audit.store import Anchor, Entry, Head, Store
from shared.db import Database
from shared.errors import DsecError


@dataclass(frozen=True)
class Verdict:
    """``seq`` and ``hash``: up to where all is right, ``count`` entries of it were read;
    ``broken_at`` is the number of the first entry that is wrong. ``anchored``: the numbers
    up to which the chain itself says that entries went."""

    seq: int
    count: int
    hash: bytes
    broken_at: int | None = None
    reason: str = ""
    anchored: frozenset[tuple[int, str]] = frozenset()


def fault(entry: Entry, seq: int, previous: bytes) -> str | None:
    """What is wrong with the entry that should be number ``seq``."""
    if entry.seq != seq:
        return f"entry {seq} is missing"
    if entry.prev != previous:
        return "it does not follow the entry before it"
    if entry.hash != link(previous, seq, entry.row.kind, canonical(entry.row.record)):
        return "its content was changed"
    if row(entry.row.kind, entry.row.record) != entry.row:
        return "its columns differ from its content"
    return None


async def verify(
    entries: AsyncIterator[Entry], head: Head, *, seq: int = 0, previous: bytes = GENESIS,
    most: int | None = None,
) -> Verdict:  # fmt: skip
    """Follows the chain behind number ``seq`` up to ``head``, or over ``most`` entries."""
    count, anchored = 0, set()
    async for entry in entries:
        if seq == head.seq:
            break  # appended since the head was read
        reason = fault(entry, seq + 1, previous)
        if reason:
            return Verdict(seq, count, previous, seq + 1, reason)
        seq, previous, count = entry.seq, entry.hash, count + 1
        if entry.row.kind == RETENTION:
            anchored.add((int(entry.row.record["seq"]), str(entry.row.record["hash"])))
    found = frozenset(anchored)
    if seq < head.seq and (most is None or count < most):
        reason = f"the record ends here, its head is {head.seq}"
        return Verdict(seq, count, previous, seq + 1, reason, found)
    if seq == head.seq and previous != head.hash:
        return Verdict(seq, count, previous, seq, "the head's hash is another", found)
    return Verdict(seq, count, previous, anchored=found)


async def verify_all(store: Store) -> tuple[Verdict, Anchor]:
    """The whole chain, from the anchor on; an anchor that no entry tells of is a fault."""
    head, anchor = await store.head(), await store.anchor()
    entries = store.entries(anchor.seq)
    verdict = await verify(entries, head, seq=anchor.seq, previous=anchor.hash)
    told = (anchor.seq, anchor.hash.hex()) in verdict.anchored
    if verdict.broken_at is None and anchor.seq and not told:
        reason = f"no entry tells that those up to {anchor.seq} went"
        return Verdict(verdict.seq, verdict.count, verdict.hash, anchor.seq + 1, reason), anchor
    return verdict, anchor


async def _verify(settings: Settings) -> tuple[Verdict, Anchor]:
    db = Database(settings.pg_dsn, "audit")
    try:
        return await verify_all(Store(db))
    finally:
        await db.close()


def run(settings: Settings) -> int:
    """Prints the verdict; 0 where the chain holds, 1 where it breaks, 2 unread."""
    try:
        verdict, anchor = asyncio.run(_verify(settings))
    except DsecError as exc:
        print(f"audit: {exc.message}", file=sys.stderr)
        return 2
    if verdict.broken_at is not None:
        print(f"broken at {verdict.broken_at}: {verdict.reason}")
        return 1
    behind = f" behind {anchor.seq}" if anchor.seq else ""
    print(f"intact: {verdict.count} entries{behind}, head {verdict.hash.hex()}")
    return 0
