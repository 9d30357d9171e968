"""Streams and durables of a test's own, and a handler that records what it got."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Sequence

from nats.js.api import StreamConfig

from schemas.streams import Durable
from shared.bus import Bus, Outgoing
from shared.consumer import BatchConsumer, Received
from shared.errors import Unavailable
from shared.topology import consumer_config


async def make_durable(
    bus: Bus, *, ack_wait_s: int = 30, max_deliver: int = 12, batch: int = 256
) -> Durable:
    """A fresh stream with one durable; its subject is ``t.<stream>``."""
    name = f"T{secrets.token_hex(5)}"
    await bus.js.add_stream(StreamConfig(name=name, subjects=[f"t.{name}"]))
    durable = Durable(
        f"d_{name}", name, (f"t.{name}",), owner="test", ack_wait_s=ack_wait_s,
        max_deliver=max_deliver, batch=batch,
    )  # fmt: skip
    await bus.js.add_consumer(name, consumer_config(durable))
    return durable


def messages(durable: Durable, bodies: Sequence[str]) -> list[Outgoing]:
    """Messages to the durable's stream; the body is the message id."""
    return [Outgoing(durable.filters[0], body.encode(), msg_id=body) for body in bodies]


class Recorder:
    """A handler. ``fails(body, attempt)`` may return an error for a message."""

    def __init__(self, fails: Callable[[str, int], Exception | None] | None = None) -> None:
        self.seen: list[str] = []
        self.attempts: Counter[str] = Counter()
        self.batches: list[int] = []
        self._fails = fails

    async def __call__(self, batch: Sequence[Received]) -> None:
        self.batches.append(len(batch))
        bodies = [item.data.decode() for item in batch]
        self.attempts.update(bodies)
        for body in bodies:
            error = self._fails(body, self.attempts[body]) if self._fails else None
            if error is not None:
                raise error
        self.seen += bodies

    async def until(self, count: int, within_s: float = 60.0) -> None:
        """Returns when ``count`` different messages were handled."""
        async with asyncio.timeout(within_s):
            while len(set(self.seen)) < count:
                await asyncio.sleep(0.01)


async def stored(bus: Bus, outgoing: Sequence[Outgoing], within_s: float = 60.0) -> None:
    """Stores with repetitions, as an outbox does."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await bus.store(outgoing)
            except Unavailable:
                await asyncio.sleep(0.1)


async def unacknowledged(bus: Bus, durable: Durable) -> int:
    """Messages that the server still holds for the durable."""
    info = await bus.js.consumer_info(durable.stream, durable.name)
    return (info.num_ack_pending or 0) + (info.num_pending or 0)


async def settled(bus: Bus, durable: Durable, within_s: float = 60.0) -> None:
    """Returns when the durable holds nothing more."""
    async with asyncio.timeout(within_s):
        while await unacknowledged(bus, durable):
            await asyncio.sleep(0.05)


__all__ = [
    "BatchConsumer", "Recorder", "make_durable", "messages", "settled", "stored", "unacknowledged",
]  # fmt: skip
