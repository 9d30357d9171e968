"""Dropping connections whose permissions are out of date.

Owns: that every instance forgets what it remembers of their principals, the system account's
connection, finding connections by principal, ending them. Does not own: deciding whose. It is
tried until a server has answered. Best effort where
there are several: a connection that is missed ends with its JWT, and every change is
judged against the present grants anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError

from schemas.base import encode
from schemas.iam import PrincipalsChanged
from schemas.subjects import FORGET
from services.auth.settings import Settings
from shared.bus import Bus, Incoming, Outgoing
from shared.errors import DsecError

log = logging.getLogger(__name__)

CONNZ = "$SYS.REQ.SERVER.PING.CONNZ"
ANSWER_S = 2.0
"""Longest wait for the first server's answer; it comes in milliseconds, or the server is
busy or away."""
RETRY_S = 1.0
"""Before it is tried again."""
QUIET_S = 0.1
"""Servers that answer later than this after another one are missed."""
AT_ONCE = 32
"""Principals looked for at a time."""
GRACE_S = 0.1
"""Between an answer on its way and the end of its receiver's connection."""
MAX_WAITING = 1_024
PAGE = 1_024
"""Connections of one principal that a server names at once."""
FLUSH_S = 2
CONNECT_S = 2
RECONNECT_WAIT_S = 1


class _Connection(msgspec.Struct):
    cid: int
    authorized_user: str = ""


class _Connections(msgspec.Struct):
    connections: list[_Connection] = []


class _Server(msgspec.Struct):
    id: str


class _Page(msgspec.Struct):
    server: _Server
    data: _Connections = msgspec.field(default_factory=_Connections)


_page = msgspec.json.Decoder(_Page)


class Kicker:
    """Drops connections in the background, through the system account. ``forget`` is told
    at once whose permissions are out of date, here and in the other instances."""

    def __init__(
        self, settings: Settings, bus: Bus, *, forget: Callable[[Collection[str]], None]
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._forget = forget
        self._queue: asyncio.Queue[frozenset[str]] = asyncio.Queue(MAX_WAITING)
        self._system: Client | None = None
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Hears of the other instances' changes; before the bus is connected."""
        self._bus.listen(FORGET, PrincipalsChanged, self._changed)

    async def _changed(self, message: PrincipalsChanged, _: Incoming) -> None:
        self._forget(message.principals)

    def start(self) -> None:
        """Begins in the background; without a system user nothing is ever dropped."""
        if self._settings.sys_user is None:
            log.warning("no system user: changed grants bite at the next connect only")
            return
        self._task = asyncio.create_task(self._run(), name="kick")

    async def close(self) -> None:
        """Ends; connections not dropped yet end with their JWT."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._system is not None:
            with contextlib.suppress(NatsError, OSError):
                await self._system.close()

    async def forget(self, principals: Collection[str]) -> None:
        """Has every instance forget what it remembers of ``principals``. To be called before
        the change is answered: who has the answer finds it done, unless the bus lost an
        instance just then."""
        self._forget(principals)
        message = PrincipalsChanged(principals=sorted(principals))
        try:
            await self._bus.send(Outgoing(FORGET, encode(message)))
        except DsecError as exc:
            log.warning("other instances were not told of a change: %s", exc.message)

    def drop(self, principals: Collection[str]) -> None:
        """Has the connections of ``principals`` dropped soon, answers first."""
        if self._task is None:
            return
        try:
            self._queue.put_nowait(frozenset(principals))
        except asyncio.QueueFull:
            log.error("too many changes at once: %d principals keep old permissions until "
                      "their connections end", len(principals))  # fmt: skip

    async def _run(self) -> None:
        principals: set[str] = set()
        while True:
            if not principals:
                principals |= await self._queue.get()
            await asyncio.sleep(GRACE_S)
            while not self._queue.empty():
                principals |= self._queue.get_nowait()
            try:
                await self._drop(principals)
                principals.clear()
            except (NatsError, OSError, TimeoutError, msgspec.MsgspecError) as exc:
                log.warning("connections of %d principals not dropped yet: %r",
                            len(principals), exc)  # fmt: skip
                await asyncio.sleep(RETRY_S)

    async def _drop(self, principals: set[str]) -> None:
        await self.forget(principals)  # again: an instance may have been away
        await self._bus.client.flush(timeout=FLUSH_S)  # the answer is with the server
        system = await self._connected()
        slots = asyncio.Semaphore(AT_ONCE)
        counts = await asyncio.gather(*(self._drop_one(system, p, slots) for p in principals))
        log.info("%d connections of %d principals dropped", sum(counts), len(principals))

    async def _drop_one(self, system: Client, principal: str, slots: asyncio.Semaphore) -> int:
        async with slots:
            found = await self._connections(system, principal)
            for server, cid in found:
                # a kick without a reply subject is ignored by the server
                subject = f"$SYS.REQ.SERVER.{server}.KICK"
                await system.request(subject, encode({"cid": cid}), timeout=FLUSH_S)
        return len(found)

    async def _connected(self) -> Client:
        if self._system is None or self._system.is_closed:
            self._system = await nats.connect(
                self._settings.nats_url.split(","),
                user=self._settings.sys_user, password=self._settings.sys_password,
                name="dsec-auth-system", max_reconnect_attempts=-1,
                connect_timeout=CONNECT_S, reconnect_time_wait=RECONNECT_WAIT_S,
                error_cb=_ignored,
            )  # fmt: skip
        return self._system

    async def _connections(self, system: Client, principal: str) -> list[tuple[str, int]]:
        """``(server, connection)`` of a principal on every server. Raises ``TimeoutError``
        where none answers: that is no word on its connections."""
        found: list[tuple[str, int]] = []
        offset, more = 0, True
        while more:  # as many as there are are found before the first one ends
            pages = await self._pages(system, principal, offset)
            found += [
                (page.server.id, c.cid) for page in pages for c in page.data.connections
                if c.authorized_user == principal
            ]  # fmt: skip
            more = any(len(page.data.connections) >= PAGE for page in pages)
            offset += PAGE
        return found

    async def _pages(self, system: Client, principal: str, offset: int) -> list[_Page]:
        """A page of every server. Raises ``TimeoutError`` where none answers."""
        query = {"auth": True, "user": principal, "limit": PAGE, "offset": offset}
        pages: list[_Page] = []
        inbox = system.new_inbox()
        answers = await system.subscribe(inbox)
        try:
            await system.publish(CONNZ, encode(query), reply=inbox)
            wait_s = ANSWER_S
            while True:
                message = await answers.next_msg(timeout=wait_s)
                pages.append(_page.decode(message.data))
                wait_s = QUIET_S
        except TimeoutError:  # that was all
            if not pages:
                raise
            return pages
        finally:
            await answers.unsubscribe()


async def _ignored(exc: Exception) -> Any:
    log.debug("system account: %r", exc)
