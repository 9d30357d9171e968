"""The bus as services use it: one connection, answers, requests, stored publishing.

Owns: how a service connects, where typed errors become wire errors and back, the
payload bound. Does not own: names (:mod:`schemas.subjects`), stored consumption
(:mod:`shared.consumer`), streams (:mod:`shared.topology`).

FastStream carries the core subjects; its error policy is set once, here. Stored
messages are consumed by :class:`shared.consumer.BatchConsumer` because FastStream's
batch pull waits out its time-out and can strand messages (docs/adr/0002).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from faststream import AckPolicy
from faststream.nats import NatsBroker, NatsMessage
from faststream.nats.security import NatsSecurity, NatsToken, NatsUserPassword
from nats.aio import client as nats_client
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext

from schemas.base import BadMessage, ErrorReply, decode, encode
from shared import quick, telemetry
from shared.errors import DsecError, Internal, InvalidRequest, Unavailable
from shared.settings import Common
from shared.stored import Outgoing as Outgoing
from shared.stored import StoredPublisher, Unstored
from shared.wire import bad_message, from_wire, to_wire

log = logging.getLogger(__name__)

RECONNECT_WAIT_S = 1
PING_INTERVAL_S = 10
REQUEST_S = 5.0
"""Default wait for an answer."""
MAX_PENDING_PUBLISHES = 4_000
"""Stored messages that one call has in flight."""
PENDING_BYTES = 64 * 1024 * 1024
"""What may wait for a server that is away."""
DRAIN_S = 3
"""Longest wait, at the end, for messages that nobody takes."""
HEADER_BYTES = 2_048
"""Room kept for the headers that the bus adds itself."""
READ_BYTES = 256 * 1024
"""Read at once. The NATS client has no option for it and reads 32 KiB, which makes a
quarter of the work of large messages."""

nats_client.DEFAULT_BUFFER_SIZE = max(nats_client.DEFAULT_BUFFER_SIZE, READ_BYTES)

T = TypeVar("T")
Answer = Callable[[Any, "Incoming"], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Incoming:
    """Where a core message came from."""

    subject: str
    headers: dict[str, str]
    reply_to: str


class Bus:
    """One service's connection. Subscribe with :meth:`answer` and :meth:`listen`
    before :meth:`start`; the connection then lives, through outages, until
    :meth:`close`."""

    def __init__(self, settings: Common, name: str, *, inbox_prefix: str = "_INBOX") -> None:
        self.name = name
        self.closed = asyncio.Event()
        """Set when the connection has ended for good: nats-py closes it on most errors
        that a server reports (expired or revoked rights), and only a new one helps."""
        self.broker = _Broker(
            settings.nats_url.split(","),
            security=_security(settings),
            name=f"dsec-{name}",
            inbox_prefix=inbox_prefix.encode(),
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=2,
            pending_size=PENDING_BYTES,
            ack_policy=AckPolicy.NACK_ON_ERROR,
            decoder=_raw,
            logger=log,
            log_level=logging.DEBUG,
            graceful_timeout=settings.shutdown_s,
            drain_timeout=DRAIN_S,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
        )
        self._js: JetStreamContext | None = None
        self._client: Client | None = None
        self._subscribed = False
        self._stored: StoredPublisher | None = None

    async def _on_error(self, exc: Exception) -> None:
        log.warning("bus: %s", exc or type(exc).__name__)

    async def _on_closed(self) -> None:
        self.closed.set()

    @property
    def client(self) -> Client:
        """The connection. Raises ``Unavailable`` before :meth:`start` ended."""
        if self._client is None:
            raise Unavailable("bus: not connected yet")
        return self._client

    @property
    def js(self) -> JetStreamContext:
        """JetStream on the connection."""
        if self._js is None:
            self._js = self.client.jetstream(timeout=REQUEST_S)
        return self._js

    @property
    def reconnects(self) -> int:
        """How often the connection has been made anew."""
        return int(self.client.stats["reconnects"])

    async def start(self) -> None:
        """Connects (waits for a server as long as it takes) and subscribes: who asks after
        it has ended is answered, by whatever connection the question comes."""
        self._client = await self.broker.connect()
        await self.broker.start()
        with contextlib.suppress(NatsError, TimeoutError, OSError):
            await self._client.flush()  # lost meanwhile, the next connection subscribes anew
        self._subscribed = True

    async def serve(self, stop: asyncio.Event) -> None:
        """Returns when ``stop`` is set. Raises ``Unavailable`` when the connection has
        ended for good: the process then ends and its supervisor starts a new one."""
        waits = [asyncio.ensure_future(event.wait()) for event in (stop, self.closed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if not stop.is_set():
            raise Unavailable("bus: the server has closed the connection for good")

    async def close(self) -> None:
        """Ends subscriptions and the connection; nothing is to be done about one that is gone
        already."""
        try:
            await self.broker.stop()
        except _GONE as exc:
            log.warning("bus: ended without the server: %s", exc)
            with contextlib.suppress(*_GONE):  # which begins with a last write
                await self.client.close()

    async def check(self) -> None:
        """A health check: raises ``Unavailable`` while there is no server."""
        if not self.client.is_connected:
            raise Unavailable("bus: not connected")
        if not self._subscribed:
            raise Unavailable("bus: not subscribed yet")

    def answer(self, subject: str, type_: type[T], fn: Answer, *, queue: str = "") -> None:
        """Answers requests on ``subject`` with what ``fn(message, incoming)`` returns,
        or with an :class:`ErrorReply`. ``queue`` shares the work among instances."""

        async def handle(message: NatsMessage) -> None:
            incoming = _incoming(message)
            reply = encode(await answered(fn, type_, message.body, incoming))
            if incoming.reply_to:
                await self.send(Outgoing(incoming.reply_to, reply))

        self.broker.subscriber(subject, queue=queue)(handle)

    def listen(self, subject: str, type_: type[T], fn: Answer, *, queue: str = "") -> None:
        """Calls ``fn(message, incoming)``; bad messages are logged and dropped."""

        async def handle(message: NatsMessage) -> None:
            incoming = _incoming(message)
            result = await answered(fn, type_, message.body, incoming)
            if isinstance(result, ErrorReply):
                log.warning("%s: %s", incoming.subject, result.error.message)

        self.broker.subscriber(subject, queue=queue)(handle)

    async def send(self, message: Outgoing) -> None:
        """Publishes at most once (answers, heartbeats, events of no record)."""
        self.check_size(message)
        try:
            await self.client.publish(
                message.subject, message.data, headers=message.headers or None
            )
        except NatsError as exc:
            raise Unavailable(f"bus: {exc or type(exc).__name__}") from exc

    async def request(
        self, subject: str, message: Any, type_: type[T], *, timeout_s: float = REQUEST_S
    ) -> T:
        """The answer to ``message``; raises the typed error of an error reply."""
        data = encode(message)
        self.check_size(Outgoing(subject, data))
        try:
            reply = await self.client.request(
                subject, data, timeout=timeout_s, headers=telemetry.headers() or None
            )
        except NoRespondersError as exc:
            raise Unavailable(f"nobody answers {subject}") from exc
        except (NatsError, TimeoutError) as exc:
            raise Unavailable(f"no answer on {subject} in {timeout_s:g} s") from exc
        return unwrap(reply.data, type_)

    async def store(self, messages: Sequence[Outgoing]) -> None:
        """Publishes to streams; returns when the server has stored them all. Raises
        ``Unavailable`` otherwise: then some may be stored, and ``msg_id`` makes a
        repetition harmless."""
        for message in messages:
            self.check_size(message)
        failed = [why for why in await self.store_each(messages) if why]
        if failed:
            raise Unavailable(f"bus: {len(failed)} not stored: {failed[0].reason}")

    async def store_each(self, messages: Sequence[Outgoing]) -> list[Unstored | None]:
        """As :meth:`store`, telling for each message why it was not stored (``None``
        where it was): one that no stream takes does not speak for its neighbours."""
        if self._stored is None:
            self._stored = StoredPublisher(self.client)
        results: list[Unstored | None] = [self._oversized(m) for m in messages]
        good = [i for i, why in enumerate(results) if why is None]
        for start in range(0, len(good), MAX_PENDING_PUBLISHES):
            chunk = good[start : start + MAX_PENDING_PUBLISHES]
            if self.client.is_connected:
                whys = await self._stored.publish([messages[i] for i in chunk])
            else:
                whys = [Unstored("not connected")] * len(chunk)
            for i, why in zip(chunk, whys, strict=True):
                results[i] = why
        return results

    def _oversized(self, message: Outgoing) -> Unstored | None:
        try:
            self.check_size(message)
        except InvalidRequest as exc:
            return Unstored(exc.message, refused=True)
        return None

    def check_size(self, message: Outgoing) -> None:
        """Raises ``InvalidRequest`` (field ``payload``) where the server would end
        the connection. Headers count."""
        limit = self.client.max_payload - HEADER_BYTES
        size = len(message.data) + sum(len(k) + len(v) + 4 for k, v in message.headers.items())
        if size > limit:
            raise InvalidRequest(
                f"a message of {size} bytes is over the bus's limit of {limit}", field="payload"
            )


_GONE = (NatsError, OSError, RuntimeError)
"""What nats-py raises of a connection that is not there; the last is uvloop's."""


class _Broker(NatsBroker):
    """FastStream's error callback raises on a refused log-in, also inside nats-py's
    reconnecting, which then ends without a sign. But a refusal may pass: a server that
    has restarted refuses nodes and clients until auth is back."""

    async def _connect(self) -> Client:
        client = quick.Patient()
        await client.connect(**self._connection_kwargs)
        self.config.connect(client)
        return client

    def _log_connection_broken(self, error_cb: Any = None) -> Any:
        return error_cb


def unwrap(data: bytes, type_: type[T]) -> T:
    """The reply in ``data``; raises its typed error where it is one."""
    try:
        error = decode(data, ErrorReply)
    except BadMessage:
        try:
            return decode(data, type_)
        except BadMessage as exc:
            raise Internal(f"an answer could not be read: {exc}") from exc
    raise from_wire(error.error)


async def answered(fn: Answer, type_: type[Any], body: Any, incoming: Incoming) -> Any:
    """What ``fn`` answers; every error in its wire form. An exception that is not
    typed is a bug: logged with its cause, answered as ``internal``."""
    try:
        message = decode(bytes(body), type_)
        with telemetry.span(incoming.subject, parents=[incoming.headers.get("traceparent")]):
            return await fn(message, incoming)
    except BadMessage as exc:
        return ErrorReply(error=to_wire(bad_message(exc)))
    except DsecError as exc:
        return ErrorReply(error=to_wire(exc))
    except Exception as exc:
        log.exception("%s failed", incoming.subject)
        return ErrorReply(error=to_wire(Internal(f"{type(exc).__name__} in {incoming.subject}")))


def _security(settings: Common) -> NatsSecurity | None:
    if settings.nats_token:  # a client's or node's key, judged by the auth callout
        return NatsToken(settings.nats_token)
    if settings.nats_user:
        return NatsUserPassword(settings.nats_user, settings.nats_password or "")
    return None


async def _raw(message: Any) -> Any:
    # bodies are decoded by schemas.base, once, with typed errors
    return message.body


def _incoming(message: NatsMessage) -> Incoming:
    raw = message.raw_message
    return Incoming(raw.subject, dict(raw.headers or {}), raw.reply)
