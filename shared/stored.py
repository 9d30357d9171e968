"""Publishing to streams with many acknowledgements in flight.

Owns: one subscription for acknowledgements, the futures that wait on it, the bound
in time. Does not own: the connection. nats-py's ``publish_async`` would do, but an
acknowledgement that never comes keeps one of its places for ever, and after an outage
or two it stalls; here what is given up is forgotten.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

PUBLISH_S = 5.0
"""Longest wait for the acknowledgements of one call."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be published. ``msg_id`` makes a stored one idempotent."""

    subject: str
    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    msg_id: str | None = None


class StoredPublisher:
    """Stores messages through ``client``; safe to use from many tasks."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prefix = ""
        self._next = 0
        self._waiting: dict[str, asyncio.Future[str | None]] = {}
        self._subscribing = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Messages whose acknowledgement is awaited now."""
        return len(self._waiting)

    async def publish(self, messages: Sequence[Outgoing]) -> list[str | None]:
        """For each message ``None`` once it is stored, else why it was not. One that
        got no answer in time may be stored all the same."""
        futures: dict[str, asyncio.Future[str | None]] = {}
        late = "no acknowledgement"
        try:
            async with asyncio.timeout(PUBLISH_S):
                await self._subscribe()
                for message in messages:
                    await self._send(message, futures)
                await asyncio.wait(futures.values())
        except (NatsError, TimeoutError, OSError) as exc:
            late = str(exc) or type(exc).__name__
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
        self, message: Outgoing, futures: dict[str, asyncio.Future[str | None]]
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


def refusal(msg: Msg) -> str | None:
    """Why the server did not store the message, ``None`` where it did."""
    if msg.headers and msg.headers.get("Status") == "503":
        return "no stream takes the subject"
    try:
        answer = json.loads(msg.data)
    except ValueError:
        return "an acknowledgement could not be read"
    error = answer.get("error")
    return f"{error.get('description')} ({error.get('err_code')})" if error else None
