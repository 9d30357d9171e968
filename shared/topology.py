"""Declares streams and durables from the map, and proves that the server has them so.

Owns: creation and verification. Does not own: names (:mod:`schemas.subjects`). The
scheduler declares at its start and after every reconnect; the others verify. Drift
fails a start; ``python -m shared.topology`` brings a server to a newer map on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator

import nats
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)  # fmt: skip
from nats.js.errors import APIError, NotFoundError

from schemas.streams import DURABLES, STREAMS, Durable, Stream
from shared.errors import Internal, Unavailable

log = logging.getLogger(__name__)


def stream_config(stream: Stream) -> StreamConfig:
    """The server's form of a stream."""
    return StreamConfig(
        name=stream.name,
        subjects=list(stream.subjects),
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW if stream.name != "DSEC_DLQ" else DiscardPolicy.OLD,
        max_age=stream.max_age_s,
        max_bytes=stream.max_bytes,
        duplicate_window=stream.duplicate_window_s,
        allow_direct=True,
    )


def consumer_config(durable: Durable, node: str | None = None) -> ConsumerConfig:
    """The server's form of a durable."""
    return ConsumerConfig(
        durable_name=durable.name.format(node=node),
        filter_subjects=[f.format(node=node) for f in durable.filters],
        ack_policy=AckPolicy.EXPLICIT,
        deliver_policy=DeliverPolicy.ALL,
        ack_wait=durable.ack_wait_s,
        max_deliver=-1,  # the consumer counts and gives up, with a dead letter
        max_ack_pending=durable.max_ack_pending,
    )


@contextlib.contextmanager
def _typed() -> Iterator[None]:
    # a server that has just come up answers 503 or not at all for a moment; a
    # refusal (limits, overlapping subjects) is a mistake that no retry heals
    try:
        yield
    except APIError as exc:
        if exc.code is not None and 400 <= exc.code < 500 and exc.code != 404:
            raise Internal(f"the bus refuses its topology: {exc.description}") from exc
        raise Unavailable(f"bus: {exc.description or type(exc).__name__}") from exc
    except (NatsError, TimeoutError, OSError) as exc:
        raise Unavailable(f"bus: {exc or type(exc).__name__}") from exc


async def declare(js: JetStreamContext) -> None:
    """Creates what is missing, then verifies everything. Safe to run twice at once.
    Raises ``Unavailable`` while the server is away, ``Internal`` on drift."""
    with _typed():
        await _declare(js)


async def _declare(js: JetStreamContext) -> None:
    for stream in STREAMS:
        try:
            await js.stream_info(stream.name)
        except NotFoundError:
            await js.add_stream(stream_config(stream))
            log.info("stream %s created", stream.name)
    for durable in DURABLES:
        await _declare_durable(js, durable)
    await _verify(js)


async def declare_durable(js: JetStreamContext, durable: Durable, node: str | None = None) -> str:
    """Creates a durable that is missing; returns its name. Errors as in
    :func:`declare`."""
    with _typed():
        return await _declare_durable(js, durable, node)


async def _declare_durable(js: JetStreamContext, durable: Durable, node: str | None = None) -> str:
    config = consumer_config(durable, node)
    name = config.durable_name or ""
    try:
        await js.consumer_info(durable.stream, name)
    except NotFoundError:
        await js.add_consumer(durable.stream, config)
        log.info("durable %s created", name)
    return name


async def upgrade(js: JetStreamContext) -> list[str]:
    """Changes what differs from the map; returns the differences that there were.
    Streams and durables that are missing are left to :func:`declare`."""
    changed: list[str] = []
    with _typed():
        for stream in STREAMS:
            with contextlib.suppress(NotFoundError):
                want, actual = stream_config(stream), (await js.stream_info(stream.name)).config
                if found := _differences(stream.name, want, actual, _STREAM_FIELDS):
                    await js.update_stream(want)
                    changed += found
        for durable in DURABLES:
            with contextlib.suppress(NotFoundError):
                config = consumer_config(durable)
                info = await js.consumer_info(durable.stream, durable.name)
                if found := _differences(durable.name, config, info.config, _CONSUMER_FIELDS):
                    await js.add_consumer(durable.stream, config)  # the same name: an update
                    changed += found
    return changed


async def verify(js: JetStreamContext) -> None:
    """Raises ``Internal`` naming every difference between the map and the server:
    a wrong unit or a foreign change shows at the start, not as a redelivery storm."""
    with _typed():
        await _verify(js)


async def _verify(js: JetStreamContext) -> None:
    wrong: list[str] = []
    for stream in STREAMS:
        actual = (await js.stream_info(stream.name)).config
        wrong += _differences(stream.name, stream_config(stream), actual, _STREAM_FIELDS)
    for durable in DURABLES:
        want = consumer_config(durable)
        info = await js.consumer_info(durable.stream, want.durable_name or "")
        wrong += _differences(durable.name, want, info.config, _CONSUMER_FIELDS)
    if wrong:
        raise Internal("the bus differs from its map: " + "; ".join(wrong))


_STREAM_FIELDS = ("subjects", "retention", "storage", "discard", "max_age", "max_bytes",
                  "duplicate_window")  # fmt: skip
_CONSUMER_FIELDS = (
    "filter_subjects", "ack_policy", "ack_wait", "max_deliver", "max_ack_pending",
)  # fmt: skip


def _differences(name: str, want: object, actual: object, fields: tuple[str, ...]) -> list[str]:
    found = []
    for field in fields:
        left, right = getattr(want, field), getattr(actual, field)
        if field == "filter_subjects" and not right and getattr(actual, "filter_subject", None):
            right = [actual.filter_subject]  # type: ignore[attr-defined] # the server's form of one
        if isinstance(left, list):
            left, right = sorted(left), sorted(right or [])
        if left != right:
            found.append(f"{name}.{field} is {right!r}, not {left!r}")
    return found


async def _main() -> None:
    client = await nats.connect(
        os.environ["DSEC_NATS_URL"],
        user=os.environ.get("DSEC_NATS_USER"),
        password=os.environ.get("DSEC_NATS_PASSWORD"),
    )
    try:
        for line in await upgrade(client.jetstream()):
            print(f"{line}: changed")
    finally:
        await client.close()


if __name__ == "__main__":
    asyncio.run(_main())
