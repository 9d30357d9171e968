"""The short way in and out of a NATS client, for small messages by the thousand and large
ones by the gigabyte.

Owns: handing messages over inside the client's own reader, writing small ones at the end
of the loop's turn and large ones without a copy; a client that waits for a server's word on
who may connect. Does not own: the connection, which stays nats-py's.

nats-py puts what it reads into a buffer that a task parses, each message into a queue that
a task of the subscription reads, and each publish into one that a task of the connection
reads: three more turns of the loop, two futures and four wake-ups for an operation
(docs/adr/0032). What comes while there is no server, or is not plain, goes its ordinary way.
The SDK has a copy of this file.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol import command
from nats.protocol.parser import AWAITING_CONTROL_LINE, MAX_CONTROL_LINE_SIZE

log = logging.getLogger(__name__)

SMALL_BYTES = 16 * 1024
"""Largest body that goes the short way."""
BUFFERED_BYTES = 1024 * 1024
"""With more than this unsent the ordinary way waits for the server."""

PENDING_BYTES = 8 * 1024 * 1024
"""With more than this unwritten too."""
READ_BYTES = 256 * 1024
"""Read at once."""
HEADERS_BYTES = 2048
"""Room that is kept for headers of a large message."""

_SUBJECT = re.compile(r"[!-~]+")
_HEADER = re.compile(r"[A-Za-z0-9-]+: [!-~](?:[ -~]*[!-~])?\r\n")

PONG = b"PONG\r\n"

Take = Callable[[Msg], None]
Data = bytes | memoryview


class Patient(Client):
    """A server that has not decided after two seconds who may connect asks whether the other
    end is still there. nats-py takes that for the answer: its ``connect`` then returns without
    a connection, and there never is one."""

    async def _process_connect_init(self) -> None:
        transport: Any = self._transport
        plain = transport.readline

        async def readline() -> bytes:
            while (line := await plain()).startswith(b"PING"):
                transport.write(PONG)
            return cast(bytes, line)

        transport.readline = readline
        try:
            await super()._process_connect_init()
        finally:
            del transport.readline


class _Handed(asyncio.Queue[Msg]):
    """A subscription's queue that nothing waits in."""

    def __init__(self, client: Client, subscription: Subscription, take: Take) -> None:
        super().__init__()
        self._client = client
        self._subscription = subscription
        self._take = take

    def put_nowait(self, item: Msg) -> None:
        self._subscription._pending_size -= len(item.data)
        _listen_in(self._client)  # it came by a connection that is new
        self.take(item)

    def take(self, item: Msg) -> None:
        try:
            self._take(item)
        except Exception:  # it would end the connection's reader
            log.exception("a message on %s", item.subject)


class _Ear(asyncio.BufferedProtocol):
    """Stands before the client's own reader and takes small messages without headers out of
    what the connection reads, as it is read. From the first byte on that is anything else, all
    goes to that reader until it has done with it: so the order stays.

    It reads into one buffer. asyncio's own loop else makes an object of 256 KiB for whatever
    comes, which costs more than all that is done with a small message."""

    def __init__(self, client: Client, reader: Any, before: Any) -> None:
        self._client = client
        self._reader = reader
        self._before = before
        self._incoming = memoryview(bytearray(READ_BYTES))

    def eof_received(self) -> bool | None:
        return cast("bool | None", self._before.eof_received())

    def connection_lost(self, exc: Exception | None) -> None:
        self._before.connection_lost(exc)

    def pause_writing(self) -> None:
        self._before.pause_writing()

    def resume_writing(self) -> None:
        self._before.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._incoming

    def buffer_updated(self, nbytes: int) -> None:
        view, parser, at = self._incoming[:nbytes], self._client._ps, 0
        busy = self._reader._buffer or parser.buf or parser.state != AWAITING_CONTROL_LINE
        if not busy and nbytes < len(self._incoming) and bytes(view[:4]) == b"MSG ":
            at = self._take(bytes(view))
        if at < nbytes:
            self._before.data_received(view[at:])  # which copies it

    def _take(self, data: bytes) -> int:
        """Where the first thing begins that is not for us."""
        at, client = 0, self._client
        while data.startswith(b"MSG ", at):
            line = data.find(b"\r\n", at, at + MAX_CONTROL_LINE_SIZE)
            facts = data[at + 4 : max(line, 0)].split(b" ")
            if len(facts) not in (3, 4):
                break
            try:
                number, begin, size = int(facts[1]), line + 2, int(facts[-1])
                subject, reply = facts[0].decode(), facts[2].decode() if len(facts) == 4 else ""
            except ValueError:
                break
            handed = getattr(client._subs.get(number), "_pending_queue", None)
            if not isinstance(handed, _Handed) or not 0 <= size <= len(data) - begin - 2:
                break
            at = begin + size + 2
            client.stats["in_msgs"] += 1
            client.stats["in_bytes"] += size
            handed.take(Msg(client, subject, reply, data[begin : begin + size]))
        return at


def _listen_in(client: Client) -> None:
    """Has what the present connection reads looked at first, where it is a plain one."""
    writer: Any = getattr(client._transport, "_io_writer", None)
    if writer is None:
        return
    protocol = writer.transport.get_protocol()
    if not isinstance(protocol, _Ear):
        reader = getattr(client._transport, "_io_reader", None)
        writer.transport.set_protocol(_Ear(client, reader, protocol))


async def subscribe(client: Client, subject: str, take: Take) -> Subscription:
    """A subscription whose messages ``take`` gets, in order, as soon as they are read. It
    must not block."""

    async def nobody(_message: Msg) -> None:
        raise RuntimeError("messages of this subscription are handed over")

    made = await client.subscribe(subject, cb=nobody, pending_msgs_limit=0, pending_bytes_limit=0)
    made._pending_queue = _Handed(client, made, take)
    _listen_in(client)
    return made


def publish(
    client: Client, subject: str, data: bytes, *, reply: str = "", at_once: bool = False
) -> bool:
    """Sends a small message without headers, ``at_once`` or at the end of the loop's turn.
    False where it has to go the ordinary way, or must not go at all: that one says why."""
    if (
        len(data) > min(SMALL_BYTES, client.max_payload)
        or not client.is_connected
        or client.is_draining_pubs
    ):
        return False
    if not _SUBJECT.fullmatch(subject) or (reply and not _SUBJECT.fullmatch(reply)):
        return False
    if not _has_room(client):
        return False
    pending = client._pending
    if not pending and not at_once:  # else somebody writes it this turn
        asyncio.get_running_loop().call_soon(flush, client)
    made = command.pub_cmd(subject, reply, data)
    pending.append(made)
    client._pending_data_size += len(made)
    client.stats["out_msgs"] += 1
    client.stats["out_bytes"] += len(data)
    if at_once:
        flush(client)
    return True


async def publish_large(
    client: Client, subject: str, data: Data, *, headers: Mapping[str, str]
) -> bool:
    """Sends a large message with ``headers`` without making one piece of both, which is
    what nats-py does with every message. As :func:`publish` otherwise; ``data`` must stay
    as it is until it is written."""
    size = len(data)
    if size > client.max_payload - HEADERS_BYTES or not client.is_connected:
        return False
    if client.is_draining_pubs or client._pending_data_size > PENDING_BYTES:
        return False
    if not _SUBJECT.fullmatch(subject):
        return False
    lines = [f"{name}: {value}\r\n" for name, value in headers.items()]
    head = f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()
    if len(head) > HEADERS_BYTES or not all(map(_HEADER.fullmatch, lines)):
        return False
    begin = f"HPUB {subject} {len(head)} {len(head) + size}\r\n".encode() + head
    client._pending.extend((begin, cast(bytes, data), b"\r\n"))
    client._pending_data_size += len(begin) + size + 2
    client.stats["out_msgs"] += 1
    client.stats["out_bytes"] += size
    if client._flush_queue is not None and client._flush_queue.empty():
        await client._flush_pending()
    return True


async def send(
    client: Client, subject: str, data: Data, headers: dict[str, str] | None, *,
    reply: str = "", at_once: bool = False,
) -> None:  # fmt: skip
    """Publishes, the short way where there is one."""
    small = not headers and isinstance(data, bytes)
    if small and publish(client, subject, cast(bytes, data), reply=reply, at_once=at_once):
        return
    large = len(data) > SMALL_BYTES and headers and not reply
    if not large or not await publish_large(client, subject, data, headers=headers or {}):
        await client.publish(subject, cast(bytes, data), reply=reply, headers=headers)


def _has_room(client: Client) -> bool:
    writer: Any = getattr(client._transport, "_io_writer", None)
    return writer is not None and writer.transport.get_write_buffer_size() < BUFFERED_BYTES


def flush(client: Client) -> None:
    """Writes what was published. What is left where the connection is lost meanwhile is sent
    by the next one."""
    if client._pending and client.is_connected and client._transport is not None:
        client._transport.writelines(client._pending)
        client._pending = []
        client._pending_data_size = 0
