"""Access records of auth's doors: every verb, once, ok or refused.

Owns: their form, and a bounded buffer for those of reads. Does not own: the record
itself (audit keeps it). Records of stored requests go through the outbox, in the
transaction of what they tell of; a read changes nothing, so its record waits in
memory for a few others: at most ``MAX_WAITING``, then reads wait for the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence

from schemas.audit import Access, AccessRecords
from schemas.base import encode
from schemas.subjects import evt
from shared import ids
from shared.bus import Bus, Outgoing
from shared.errors import DsecError, Unavailable

log = logging.getLogger(__name__)

SOURCE = "auth"
FLUSH_S = 0.25
RETRY_S = 0.5
FLUSH_RECORDS = 256
MAX_WAITING = 4_096
CLOSE_S = 3.0
SHOWN_TARGETS = 16
"""Of a request about many sandboxes so many uids are named; ``count`` has them all."""


def message(records: Sequence[Access], key: str) -> Outgoing:
    """The stored form of ``records``; ``key`` is one token of the subject."""
    body = encode(AccessRecords(source=SOURCE, records=list(records)))
    return Outgoing(evt(SOURCE, "access", key), body, msg_id=f"access-{records[0].id}")


def targets(names: Sequence[str]) -> str:
    """Names in one field, shortened."""
    more = len(names) - SHOWN_TARGETS
    return " ".join(names[:SHOWN_TARGETS]) + (f" +{more}" if more > 0 else "")


class AccessBuffer:
    """Sends records of reads in the background until :meth:`close`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._key = ids.new()
        self._waiting: list[Access] = []
        self._begun = 0
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins in the background."""
        self._task = asyncio.create_task(self._run(), name="access records")

    async def add(self, record: Access) -> None:
        """Takes a record; waits only while the buffer is full."""
        while len(self._waiting) >= MAX_WAITING:
            self._room.clear()
            await self._room.wait()
        self._waiting.append(record)
        if len(self._waiting) >= FLUSH_RECORDS:
            self._wake.set()

    async def close(self) -> None:
        """Sends what waits, then ends; gives up after ``CLOSE_S``."""
        if self._task is None:
            return
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        try:
            async with asyncio.timeout(CLOSE_S):
                while self._waiting:
                    await self._flush()
        except (TimeoutError, DsecError):
            log.error("%d access records of reads are lost", len(self._waiting))

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                while self._waiting:
                    await self._flush()
            except Unavailable as exc:
                log.warning("access records wait: %s", exc.message)
                await asyncio.sleep(RETRY_S)

    async def _flush(self) -> None:
        # what may be stored already is sent again as it was: with more in it, it would still
        # be a repetition to the bus, and the rest be lost
        self._begun = self._begun or min(len(self._waiting), FLUSH_RECORDS)
        records = self._waiting[: self._begun]
        await self._bus.store([message(records, self._key)])
        del self._waiting[: self._begun]
        self._begun = 0
        self._room.set()
