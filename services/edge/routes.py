"""Routes: the few addresses that a sandbox without a network may reach, by name.

Owns: which address a name means on this node, waiting for connections at the sandbox's
own loopback ports, carrying bytes both ways. Does not own: who may ask for a route (auth
judged that), listening inside (the drivers').

A name leads to exactly one address that the operator wrote down: nothing that comes from
the sandbox says where a connection goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from services.edge.drivers.base import Accepting, Stream
from services.edge.drivers.offers import offered
from services.edge.sandbox.actor import Sandbox
from services.edge.sandbox.ending import Interrupted
from shared import ids
from shared.errors import DsecError, InvalidRequest, Unavailable

log = logging.getLogger(__name__)

BUS = "bus"
"""The route to the bus, which every node has."""
WAITING = 2
"""Acceptors of one route: while one takes a connection another one waits."""
CONNECT_S = 10.0
LISTEN_S = 5.0
READ_BYTES = 64 * 1024
AGAIN_MIN_S, AGAIN_MAX_S = 0.05, 2.0
"""Wait after an acceptor failed, as while the sandbox's agent is away."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address."""

    host: str
    port: int


def parse(text: str, *, bus: str) -> dict[str, Address]:
    """``name=host:port`` with commas between, and the bus. Raises ``InvalidRequest``."""
    found = {BUS: _address(bus.split(",")[0].rpartition("//")[2].rpartition("@")[2])}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, address = part.partition("=")
        if not equals or not ids.is_token(name) or name == BUS:
            raise InvalidRequest(f"DSEC_ROUTES: {part!r} is not name=host:port", field="routes")
        found[name] = _address(address)
    return found


def _address(text: str) -> Address:
    host, _, port = text.strip("/").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InvalidRequest(f"{text!r} is not host:port", field="routes")
    return Address(host.strip("[]"), int(port))


class Relayed:
    """One connection, the drivers' ``PortIO``: out to ``address`` once it is made inside."""

    def __init__(self, address: Address) -> None:
        self.came = asyncio.Event()
        self._address = address
        self._open: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
        self._open = asyncio.get_running_loop().create_future()

    async def connected(self) -> None:
        """Somebody inside connected. Raises ``Unavailable`` where nothing answers."""
        self.came.set()
        host, port = self._address.host, self._address.port
        try:
            async with asyncio.timeout(CONNECT_S):
                self._open.set_result(await asyncio.open_connection(host, port))
        except (OSError, TimeoutError) as exc:
            raise Unavailable(f"the route's end does not answer: {exc!r}") from exc

    async def output(self, stream: Stream, data: bytes) -> None:
        """Takes what the inside sent."""
        writer = (await self._open)[1]
        writer.write(data)
        await writer.drain()

    async def output_ended(self) -> None:
        """The inside sends no more."""
        writer = (await self._open)[1]
        with contextlib.suppress(OSError):
            writer.write_eof()

    async def input(self) -> AsyncIterator[bytes]:
        """What comes from the route's end."""
        reader = (await self._open)[0]
        while data := await reader.read(READ_BYTES):
            yield data

    def close(self) -> None:
        """Ends the outer connection."""
        if self._open.done() and not self._open.cancelled():
            self._open.result()[1].close()
        self._open.cancel()


class Routes:
    """The routes of all sandboxes of this node. ``most``: connections of one sandbox."""

    def __init__(self, known: Mapping[str, Address], *, most: int) -> None:
        self.known = known
        self._most = most
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, sandbox: Sandbox) -> None:
        """Keeps the routes of its spec until the sandbox ends. Returns when their ports
        listen, or cannot; an agent that does not say so for ``LISTEN_S`` is not waited for."""
        wanted = sandbox.accepted.resolved.spec.routes
        room = asyncio.Semaphore(self._most)
        listening: list[asyncio.Event] = []
        for name, port in wanted.items():
            if (address := self.known.get(name)) is not None:
                for _ in range(WAITING):
                    listens = asyncio.Event()
                    listening.append(listens)
                    self._spawn(self._accept(sandbox, port, address, room, listens))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LISTEN_S):
                for listens in listening:
                    await listens.wait()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(
        self, sandbox: Sandbox, port: int, address: Address, room: asyncio.Semaphore,
        listens: asyncio.Event,
    ) -> None:  # fmt: skip
        wait_s = AGAIN_MIN_S
        while sandbox.ending is None:
            await room.acquire()
            relayed = Relayed(address)
            carrying = self._spawn(self._carry(sandbox, port, relayed, room, listens))
            coming = asyncio.ensure_future(relayed.came.wait())
            try:
                await asyncio.wait({carrying, coming}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                coming.cancel()
            if relayed.came.is_set():
                wait_s = AGAIN_MIN_S
                continue
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, AGAIN_MAX_S)

    async def _carry(
        self, sandbox: Sandbox, port: int, relayed: Relayed, room: asyncio.Semaphore,
        listens: asyncio.Event,
    ) -> None:  # fmt: skip
        try:
            driver = offered(sandbox.driver, Accepting)
            assert driver is not None
            accepting = driver.accept(sandbox.present(), port, relayed, listens=listens)
            await sandbox.fate.race(accepting)
        except Interrupted:
            pass
        except (DsecError, OSError) as exc:
            log.info("a route of sandbox %s: %r", sandbox.uid, exc)
        finally:
            listens.set()
            relayed.close()
            room.release()

    async def close(self) -> None:
        """Ends all connections; the sandboxes live on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
