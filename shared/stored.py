"""Publishing to streams with many acknowledgements in flight.

Owns: one subscription for acknowledgements, the futures that wait on it, the bound
in time. Does not own: the connection. nats-py's ``publish_async`` would do, but an
acknowledgement that never comes keeps one of its places for ever, and after an outage
or two it stalls; here what is given up is forgotten.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from schemas.base import encode
from schemas.bus import DeadLetter
from schemas.subjects import dlq

PUBLISH_S = 5.0
"""Longest wait for the acknowledgements of one call."""
DEAD_LETTER_BYTES = 64 * 1024
"""What a dead letter holds of its message."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be published. ``msg_id`` makes a stored one idempotent."""

    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    msg_id: str | None = None


PASSING = frozenset({10008, 10023, 10047, 10077})
"""JetStream's errors that are no word about the message: not available, out of
resources, stream or server full."""


@dataclass(frozen=True, slots=True)
class Unstored:
    """Why a message was not stored. ``refused``: the server says that it will not take
    this one, rather than being away, slow or full."""

    reason: str
    refused: bool = False


def dead_letter(
    subject: str, data: bytes, *, stream: str, durable: str, seq: int, deliveries: int, cause: str
) -> Outgoing:
    """A message that was given up, as its dead letter."""
    letter = DeadLetter(
        stream=stream, subject=subject, durable=durable, stream_seq=seq, deliveries=deliveries,
        cause=cause[:1000], at=time.time(), body=data[:DEAD_LETTER_BYTES], size_bytes=len(data),
    )  # fmt: skip
    return Outgoing(dlq(stream), encode(letter), msg_id=f"dlq-{durable}-{seq}")


class StoredPublisher:
    """Stores messages through ``client``; safe to use from many tasks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefix = ""
        self._next = 0
        self._waiting: dict[str, asyncio.Future[Unstored | None]] = {}
        self._subscribing = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Messages whose acknowledgement is awaited now."""
        return len(self._waiting)

    async def publish(self, messages: Sequence[Outgoing]) -> list[Unstored | None]:
        """For each message ``None`` once it is stored, else why it was not. One that
        got no answer in time may be stored all the same."""
        futures: dict[str, asyncio.Future[Unstored | None]] = {}
        late = Unstored("no acknowledgement")
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self._subscribe()
                for message in messages:
                    await self._send(message, futures)
                await asyncio.wait(futures.values())
        except (NatsError, TimeoutError, OSError) as exc:
            late = Unstored(str(exc) or type(exc).__name__)
        finally:
            for token in futures:
                self._waiting.pop(token, None)
        results = [f.result() if f.done() else late for f in futures.values()]
        return results + [late] * (len(messages) - len(results))

    async def _subscribe(self) -> None:
        async with self._subscribing:
            if not self._prefix:
                prefix = self._client.new_inbox()
                await self._client.subscribe(f"{prefix}.*", cb=self._acknowledged)
                self._prefix = prefix

    async def _send(
        self, message: Outgoing, futures: dict[str, asyncio.Future[Unstored | None]]
    ) -> None:
        headers = dict(message.headers)
        if message.msg_id:
            headers["Nats-Msg-Id"] = message.msg_id
        self._next += 1
        token = str(self._next)
        futures[token] = self._waiting[token] = asyncio.get_running_loop().create_future()
        reply = f"{self._prefix}.{token}"
        await self._client.publish(
            message.subject, message.data, reply=reply, headers=headers or None
        )

    async def _acknowledged(self, msg: Msg) -> None:
        future = self._waiting.get(msg.subject.rpartition(".")[2])
        if future is not None and not future.done():
            future.set_result(refusal(msg))


def refusal(msg: Msg) -> Unstored | None:
    """Why the server did not store the message, ``None`` where it did."""
    if msg.headers and msg.headers.get("Status") == "503":
        return Unstored("no stream takes the subject", refused=True)
    try:
        answer = json.loads(msg.data)
    except ValueError:
        return Unstored("an acknowledgement could not be read")
    error = answer.get("error")
    if not error:
        return None
    code = error.get("err_code")
    return Unstored(f"{error.get('description')} ({code})", refused=code not in PASSING)
