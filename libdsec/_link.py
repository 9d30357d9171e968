"""One connection to the bus, for as long as the client lives.

Owns: connecting with the caller's key, staying connected, the payload limit,
telling who caused a refused publish. Does not own: what is said over it
(:mod:`libdsec._calls`, :mod:`libdsec._operation`).

The NATS client gives up for ever on some errors of the server (an expired
credential among them); then the link makes a new one. Being refused on *re*connect
is not final: the service that knows the keys may be restarting. Calls made in that
time fail with ``Unauthenticated``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio import client as nats_client
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from libdsec import _quick
from libdsec._wire import inbox_prefix
from libdsec.config import Config
from libdsec.errors import DSecError, Forbidden, InvalidRequest, Unauthenticated, Unavailable

log = logging.getLogger("libdsec")

RECONNECT_WAIT_S = 0.5
PING_INTERVAL_S = 10
MAX_OUTSTANDING_PINGS = 2
PENDING_BYTES = 64 * 1024 * 1024
"""What may wait for a server that is away."""
REFUSED_FAST_S = 1.0
"""A refusal sooner than this was somebody's decision; later, that nobody decided."""
REFUSALS_AT_OPEN = 2
HEADER_FRAME_BYTES = len(b"NATS/1.0\r\n\r\n")
READ_BYTES = 256 * 1024
"""Read at once. The NATS client has no option for it and reads 32 KiB, which makes a
quarter of the work of large messages."""

nats_client.DEFAULT_BUFFER_SIZE = max(nats_client.DEFAULT_BUFFER_SIZE, READ_BYTES)

_VIOLATION = re.compile(r'permissions violation for publish to "([^"]+)"', re.IGNORECASE)

Handler = Callable[[Msg], Awaitable[None]]


class Link:
    """The connection. ``on_refused(subject, error)`` hears of publishes that the
    server refused, ``on_up()`` of every reconnect, ``on_denied(error)`` of refused
    credentials."""

    def __init__(self, config: Config, connection: str) -> None:
        self.config = config
        self.connection = connection
        self.inbox = inbox_prefix(config.principal, connection)
        self.on_refused: Callable[[str, DSecError], None] = lambda _s, _e: None
        self.on_denied: Callable[[DSecError], None] = lambda _e: None
        self.on_up: Callable[[], None] = lambda: None
        self._subscriptions: dict[object, tuple[str, Handler]] = {}
        self._made: dict[object, Subscription] = {}  # of the present connection
        self._taken: dict[str, _quick.Take] = {}
        self._client = Client()
        self._connected: Client | None = None
        self._denied: Unauthenticated | None = None
        self._refusals = 0
        self._why = ""
        self._dialled_at = 0.0
        self._closing = False
        self._reopening: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Link({self.config.url!r}, {'up' if self.is_up else 'down'})"

    @property
    def is_up(self) -> bool:
        """Whether there is a server now."""
        return bool(self._client.is_connected)

    def subscribe(self, subject: str, take: _quick.Take) -> None:
        """A subscription of every connection to come; ``take`` does not block. Call before
        :meth:`open`."""
        self._taken[subject] = take

    async def open(self, timeout_s: float) -> None:
        """Connects. Raises ``Unauthenticated`` or ``Unavailable``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._connect()
        except TimeoutError:
            await self._discard()
            why = f" ({self._why})" if self._why else ""
            raise self._denied or Unavailable(
                f"no server at {self.config.url} within {timeout_s:g} s{why}"
            ) from None
        except BaseException:
            await self._discard()
            raise

    async def _connect(self) -> None:
        """One NATS client, connected and subscribed."""
        client = self._client = _quick.Patient()
        refused = asyncio.get_running_loop().create_future()
        dialling = asyncio.ensure_future(self._dial(client, refused))
        try:
            await asyncio.wait({dialling, refused}, return_when=asyncio.FIRST_COMPLETED)
            if not dialling.done():
                raise refused.result()
            await dialling
        except BaseException:
            dialling.cancel()
            await _close(client)
            raise
        finally:
            refused.cancel()
        self._connected = client
        self._denied, self._refusals = None, 0
        for subject, take in self._taken.items():
            await _quick.subscribe(client, subject, take)
        for key in list(self._subscriptions):
            await self._subscribe(key)
        await client.flush()

    async def _dial(self, client: Client, refused: asyncio.Future[DSecError]) -> None:
        async def on_error(exc: Exception) -> None:
            error = self._heard(exc)
            if error is not None and not refused.done():
                refused.set_result(error)

        async def on_closed() -> None:
            if client is self._connected:  # it gave up after it once worked
                self._reopen_later()

        self._dialled_at = time.monotonic()
        await client.connect(
            self.config.servers,
            token=self.config.api_key,
            name=f"libdsec-{self.connection}",
            inbox_prefix=self.inbox,
            allow_reconnect=True,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            pending_size=PENDING_BYTES,
            error_cb=on_error,
            reconnected_cb=self._on_reconnected,
            disconnected_cb=self._on_disconnected,
            closed_cb=on_closed,
        )

    def _heard(self, exc: Exception) -> DSecError | None:
        """An error of the NATS client; returns one that ends the attempt to open."""
        text = str(exc) or type(exc).__name__
        found = _VIOLATION.search(text)
        if found:
            self.on_refused(found.group(1), Forbidden(f"not granted: {found.group(1)}"))
            return None
        if "authorization violation" not in text.lower():
            log.debug("bus: %s", text)
            self._why = text
            return None
        fast = time.monotonic() - self._dialled_at < REFUSED_FAST_S
        self._dialled_at = time.monotonic() + RECONNECT_WAIT_S
        self._refusals += fast
        error = Unauthenticated("the server does not accept this key", field="api_key")
        if self._refusals < REFUSALS_AT_OPEN:
            return None
        self._denied = error
        self.on_denied(error)
        return error

    async def _on_disconnected(self) -> None:
        self._dialled_at = time.monotonic()

    async def _on_reconnected(self) -> None:
        self._denied, self._refusals = None, 0
        self.on_up()

    def _reopen_later(self) -> None:
        """The NATS client gave up: make a new one, unless that was us."""
        if not self._closing and self._reopening is None:
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        while not self._closing:
            await asyncio.sleep(RECONNECT_WAIT_S)
            try:
                await self._connect()
            except (DSecError, NatsError, OSError, TimeoutError) as exc:
                log.debug("bus: %s", exc)
                continue
            self._reopening = None
            self.on_up()
            return

    def check_size(self, data: bytes | memoryview, headers: dict[str, str] | None) -> None:
        """Raises ``InvalidRequest`` for a message the server would cut us off for.
        Headers count."""
        size = len(data)
        if headers:
            size += HEADER_FRAME_BYTES
            size += sum(len(k.encode()) + len(v.encode()) + 4 for k, v in headers.items())
        limit = self._client.max_payload
        if size > limit:
            text = f"the message has {size} bytes, the server takes {limit}"
            raise InvalidRequest(text, field="payload")

    async def publish(
        self, subject: str, data: bytes | memoryview, *, reply: str = "",
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Sends a message (kept, within bounds, while the server is away). Raises
        ``InvalidRequest``, ``Unauthenticated`` or ``Unavailable``."""
        if self._closing:
            raise Unavailable("the client is closed", retryable=False)
        if self._denied is not None:
            raise self._denied
        self.check_size(data, headers)
        try:
            await _quick.send(self._client, subject, data, headers, reply=reply)
        except (NatsError, OSError) as exc:
            raise Unavailable(f"bus: {exc or type(exc).__name__}") from exc

    async def listen(self, subject: str, handler: Handler) -> Callable[[], Awaitable[None]]:
        """A subscription made now; the returned call ends it."""
        key = object()
        self._subscriptions[key] = (subject, handler)
        try:
            await self._subscribe(key)
            await self._client.flush()
        except BaseException:
            del self._subscriptions[key]
            raise

        async def end() -> None:
            self._subscriptions.pop(key, None)
            made = self._made.pop(key, None)
            try:
                if made is not None:
                    await made.unsubscribe()
            except (NatsError, OSError):
                log.debug("bus: %s: already gone", subject)

        return end

    async def _subscribe(self, key: object) -> None:
        subject, handler = self._subscriptions[key]
        self._made[key] = await self._client.subscribe(
            subject, cb=handler, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def flush(self, timeout_s: float) -> None:
        """Returns when the server has seen all that was published."""
        try:
            await self._client.flush(timeout=timeout_s)  # type: ignore[arg-type]
        except (NatsError, OSError, TimeoutError) as exc:
            raise Unavailable(f"bus: {exc or type(exc).__name__}") from exc

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        self._closing = True
        if self._reopening is not None:
            self._reopening.cancel()
        await self._discard()

    async def _discard(self) -> None:
        self._closing = True
        await _close(self._client)


async def _close(client: Client) -> None:
    """Closes a NATS client in whatever state it is."""
    try:
        await client.close()
    except (NatsError, OSError, TimeoutError, AssertionError) as exc:
        log.debug("bus: %s", exc)


def status(message: Msg) -> str | None:
    """The server's own status of a message (``503``: nobody listens)."""
    headers: dict[str, Any] | None = message.headers
    return headers.get("Status") if headers and not message.data else None
