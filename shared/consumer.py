"""Batches of stored messages: the consumer every hot path uses.

Owns: fetching, acknowledging after the work is durable, back-off, isolation of a
poison message, dead letters, rebuilding a subscription that fell silent. Does not
own: what the work is.

A handler takes a list and makes one transaction of it. When it raises
``Unavailable`` the whole batch comes again later (an outage says nothing about the
messages). When it raises anything else the batch is halved until the message at fault
stands alone: only that one is delayed, and given up after its last delivery, or at
once where it could not be read (``BadMessage``: it will not become readable).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from schemas.base import HEADER_REPLY, HEADER_TRACE, BadMessage
from schemas.streams import Durable
from shared.bus import Bus
from shared.errors import Unavailable
from shared.process import unless_stopped
from shared.pulling import WAIT_S, Pull
from shared.stored import dead_letter

log = logging.getLogger(__name__)

REBUILD_S = 0.5
BACKOFF_BASE_S = 0.1
BACKOFF_MAX_S = 20.0


def backoff_s(deliveries: int) -> float:
    """Delay before delivery ``deliveries + 1``, in seconds."""
    return float(min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2 ** max(0, deliveries - 1)))


class Received:
    """A stored message in a batch."""

    __slots__ = ("data", "deliveries", "headers", "msg", "stream_seq", "subject")

    def __init__(self, msg: Msg) -> None:
        self.msg = msg
        self.subject = msg.subject
        self.data = msg.data
        self.headers: dict[str, str] = msg.headers or {}
        meta = msg.metadata
        self.deliveries: int = meta.num_delivered or 1
        self.stream_seq: int = meta.sequence.stream if meta.sequence else 0

    @property
    def reply_to(self) -> str | None:
        """The client's inbox, when it wants an answer."""
        return self.headers.get(HEADER_REPLY)

    @property
    def trace(self) -> str | None:
        """The sender's trace context."""
        return self.headers.get(HEADER_TRACE)

    async def in_progress(self) -> None:
        """Asks the server for another ``ack_wait``: long work goes on."""
        await self.msg.in_progress()


Handler = Callable[[Sequence[Received]], Awaitable[None]]


class BatchConsumer:
    """Runs ``handler`` on batches of one durable until :meth:`close`."""

    def __init__(
        self, bus: Bus, durable: Durable, handler: Handler, *, node: str | None = None
    ) -> None:
        self._bus = bus
        self._durable = durable
        self._name = durable.name.format(node=node)
        self._handler = handler
        self._task: asyncio.Task[None] | None = None
        self._pull: Pull | None = None
        self._closing = asyncio.Event()
        self.handled = 0
        self.last_fetch_at = 0.0

    @property
    def name(self) -> str:
        """The durable's name."""
        return self._name

    def start(self) -> None:
        """Begins in the background."""
        self._task = asyncio.create_task(self._run(), name=f"consume {self._name}")

    async def close(self, timeout_s: float = 5.0) -> None:
        """Finishes the batch at hand, and what has come already, then ends."""
        self._closing.set()
        if self._pull is not None:
            self._pull.stop()
        if self._task is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._task)
        except (TimeoutError, asyncio.CancelledError):
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def check(self) -> None:
        """A health check: raises ``Unavailable`` when nothing was fetched of late."""
        if time.monotonic() - self.last_fetch_at > WAIT_S * 10:
            raise Unavailable(f"consumer {self._name} is silent")

    async def _run(self) -> None:
        while not self._closing.is_set() and not self._bus.closed.is_set():
            try:
                await self._consume()
            except asyncio.CancelledError:
                raise
            except (NatsError, OSError, Unavailable) as exc:
                log.debug("consumer %s rebuilt after %r", self._name, exc)
            except Exception:
                log.exception("consumer %s rebuilt", self._name)
            if (task := asyncio.current_task()) and task.cancelling():
                # nats-py turns a cancel on a closed connection into an error of its own
                raise asyncio.CancelledError
            await self._rest(REBUILD_S)

    async def _consume(self) -> None:
        client, stream = self._bus.client, self._durable.stream
        pull = self._pull = Pull(client, stream=stream, durable=self._name)
        silent = 0
        try:
            # nothing else says whether the durable is there
            await self._look()
            await pull.open()
            self.last_fetch_at = time.monotonic()
            while not self._closing.is_set():
                messages = await pull.next(self._durable.batch)
                silent = 0 if messages else silent + 1
                if silent and silent % 10 == 0:  # is it quiet, or is the durable gone?
                    await self._look()
                self.last_fetch_at = time.monotonic()
                if messages:
                    if self._durable.linger_s and len(messages) < self._durable.batch:
                        await self._rest(self._durable.linger_s)
                    await self._process([Received(m) for m in messages])
            if left := await pull.close():
                await self._process([Received(m) for m in left])
        except NotFoundError:
            log.warning("durable %s does not exist (yet)", self._name)
        finally:
            with contextlib.suppress(NatsError, TimeoutError):
                await pull.close()

    async def _look(self) -> None:
        """Raises ``NotFoundError`` where there is no such durable."""
        look = self._bus.js.consumer_info(self._durable.stream, self._name)
        await unless_stopped(self._closing, look)

    async def _rest(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _process(self, batch: list[Received]) -> None:
        try:
            await self._handler(batch)
        except Unavailable as exc:
            log.warning("%s: %d delayed: %s", self._name, len(batch), exc.message)
            await self._settle(batch, exc, outage=True)
            return
        except Exception as exc:
            if len(batch) == 1:
                log.exception("%s: message %d failed", self._name, batch[0].stream_seq)
                await self._settle(batch, exc, outage=False)
                return
            log.warning("%s: a batch of %d failed (%r), halved", self._name, len(batch), exc)
            middle = len(batch) // 2
            await self._process(batch[:middle])
            await self._process(batch[middle:])
            return
        self.handled += len(batch)
        for item in batch:
            await item.msg.ack()

    async def _settle(self, batch: list[Received], exc: Exception, *, outage: bool) -> None:
        for item in batch:
            # an outage may last: its messages are only given up by the stream's age
            last = item.deliveries >= self._durable.max_deliver
            hopeless = last or isinstance(exc, BadMessage)  # it will not read better later
            if hopeless and not outage:
                await self._give_up(item, exc)
            else:
                await item.msg.nak(delay=backoff_s(item.deliveries))

    async def _give_up(self, item: Received, exc: Exception) -> None:
        letter = dead_letter(
            item.subject, item.data, stream=self._durable.stream, durable=self._name,
            seq=item.stream_seq, deliveries=item.deliveries, cause=f"{type(exc).__name__}: {exc}",
        )  # fmt: skip
        await self._bus.store([letter])
        await item.msg.term()
