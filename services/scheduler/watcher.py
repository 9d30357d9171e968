"""The watcher: heartbeats → load view and node rows; silence → lost.

Owns: what was heard and when, coalesced writes. Does not own: the load view's keys
(:mod:`shared.loadview`), the end of a lost node's sandboxes (``reconcile``).

Every scheduler hears every heartbeat; the last time is shared in the node's row, so
that one which hears nothing (its own connection is away) condemns nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from schemas.node import Heartbeat
from services.scheduler import nodes
from services.scheduler.settings import Settings
from shared.bus import Incoming
from shared.db import Database
from shared.errors import DsecError, Forbidden, Unavailable
from shared.loadview import LoadView

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Between looks for silent nodes."""
STOOD = 0.5
"""Later than so much of what silence takes, a look finds that this process stood still:
what was said meanwhile is not read yet."""

Step = Callable[[list[Heartbeat]], Awaitable[None]]


class Watcher:
    """Call :meth:`heard` for each heartbeat; runs between :meth:`start` and
    :meth:`close`. ``connected`` says whether the bus is there; ``more_room`` is told when
    what a node says it can take is another and both are written."""

    def __init__(
        self, settings: Settings, db: Database, load: LoadView,
        *, connected: Callable[[], bool], more_room: Callable[[], Awaitable[None]],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._more_room = more_room
        self._db = db
        self._load = load
        self._connected = connected
        self._fresh: dict[str, Heartbeat] = {}
        self._beats: dict[str, tuple[Heartbeat, float]] = {}
        self._written: dict[str, tuple[object, float]] = {}
        self._listening_since: float | None = None
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def heard(self, beat: Heartbeat, incoming: Incoming) -> None:
        """Takes a heartbeat. Raises ``Forbidden`` for one under another's name."""
        if incoming.subject.rpartition(".")[2] != beat.node:
            raise Forbidden(f"{incoming.subject} cannot speak for {beat.node}")
        known = self._beats.get(beat.node)
        if known and known[0].epoch == beat.epoch and known[0].seq > beat.seq:
            return  # overtaken on its way
        self._beats[beat.node] = (beat, time.monotonic())
        self._fresh[beat.node] = beat
        self._wake.set()

    def start(self) -> None:
        """Begins to write and to look for silence."""
        self._tasks = [
            asyncio.create_task(self._write_loop(), name="watcher write"),
            asyncio.create_task(self._silence_loop(), name="watcher silence"),
        ]

    async def close(self) -> None:
        """Ends."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _write_loop(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            beats, self._fresh = list(self._fresh.values()), {}
            steps: list[Step] = [self._write_rows, self._write_load]
            if any(self._says_other(beat) for beat in beats):
                steps.append(self._tell)
            for step in steps:
                try:
                    await step(beats)
                except DsecError as exc:
                    log.debug("watcher: %s", exc.message)  # the next beat comes in a second
                except Exception:
                    log.exception("watcher")
            await asyncio.sleep(self._settings.load_write_s)

    async def _tell(self, _: list[Heartbeat]) -> None:
        await self._more_room()

    async def _write_load(self, beats: list[Heartbeat]) -> None:
        await self._load.write(beats)

    async def _write_rows(self, beats: list[Heartbeat]) -> None:
        now = time.monotonic()
        due = [b for b in beats if self._due(b, now)]
        if not due:
            return
        async with self._db.transaction() as connection:
            await nodes.seen(connection, due)
        for beat in due:
            self._written[beat.node] = (_lasting(beat), now)

    def _due(self, beat: Heartbeat, now: float) -> bool:
        if self._says_other(beat):
            return True
        return now - self._written[beat.node][1] >= self._settings.node_write_s

    def _says_other(self, beat: Heartbeat) -> bool:
        """Whether it says what its row does not say yet."""
        known = self._written.get(beat.node)
        return known is None or known[0] != _lasting(beat)

    async def _silence_loop(self) -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(LOOK_S)
            if time.monotonic() - began - LOOK_S > self._settings.silence_s * STOOD:
                self._listening_since = None
            try:
                await self.look()
            except Unavailable as exc:
                log.debug("watcher: %s", exc.message)
            except Exception:
                log.exception("watcher")

    async def look(self) -> list[str]:
        """Marks silent nodes as lost; returns them. Only after listening itself for
        as long as silence takes: after an outage of the bus, or of this process, everyone
        was silent."""
        now = time.monotonic()
        if not self._connected():
            self._listening_since = None
            return []
        if self._listening_since is None:
            self._listening_since = now
        if now - self._listening_since < self._settings.silence_s:
            return []
        heard = [n for n, (_, at) in self._beats.items() if now - at < self._settings.silence_s]
        async with self._db.transaction() as connection:
            lost = await nodes.mark_lost(connection, self._settings.silence_s, heard)
        for node in lost:
            self._written.pop(node, None)
            log.warning("node %s is silent: lost", node)
        return lost


def _lasting(beat: Heartbeat) -> object:
    """What of a heartbeat is worth a row of its own."""
    return (beat.epoch, beat.pool, beat.admitting, beat.capacity, beat.backends)
