"""Requests and their answers over one link.

Owns: reads (core request/reply, repeated until answered), stored requests
(published until the server has them, answered on the client's inbox), who waits
for what. Does not own: the connection or the streams of operations.

A lost answer is healed: reads are repeated, stored requests are sent again with
the same request id, which the services recognise.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from nats.aio.msg import Msg

from libdsec import _ids, _trace, counting
from libdsec._link import Link, status
from libdsec._wire import (
    HEADER_REPLY,
    BadMessage,
    WireError,
    decode,
    encode,
    get,
    put,
    req,
)
from libdsec.errors import DSecError, InternalError, Unavailable, from_wire

TRY_S = 2.0
"""Wait for an answer before asking again; doubles up to MAX_TRY_S."""
MAX_TRY_S = 10.0
RESEND_S = 5.0
"""Wait for the answer to a stored request before sending it again."""
BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.0
READ_S = 15.0
"""Default bound of a read."""
CHANGE_S = 30.0
"""Default bound of a stored request and its answer."""

T = TypeVar("T")


class _Probe(msgspec.Struct):
    """Only the part that tells an error reply from all others."""

    error: WireError | None = None


class _PubAck(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    error: dict[str, Any] | None = None


class NobodyListens(Exception):
    """The server's answer where nobody is subscribed."""


@dataclass
class Mailbox:
    """Answers to one message of ours: a subject and what came there."""

    subject: str
    address: str
    _items: asyncio.Queue[bytes | Exception] = field(default_factory=asyncio.Queue)

    def put(self, item: bytes | Exception) -> None:
        """An answer, or why there will be none."""
        self._items.put_nowait(item)

    async def next(self, timeout_s: float) -> bytes:
        """The next answer. Raises ``TimeoutError``, :class:`NobodyListens` or what
        the mailbox was failed with."""
        async with asyncio.timeout(max(timeout_s, 0)):
            item = await self._items.get()
        if isinstance(item, Exception):
            raise item
        return item


class Calls:
    """Mailboxes over a link. ``own`` is the project of the client."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._prefix = f"{link.inbox}.r."
        self._boxes: dict[str, Mailbox] = {}
        self._count = 0
        link.subscribe(f"{self._prefix}*", self._on_message)

    def _on_message(self, message: Msg) -> None:
        box = self._boxes.get(message.subject)
        if box is not None:
            box.put(NobodyListens() if status(message) == "503" else message.data)

    def refuse(self, subject: str, error: DSecError) -> None:
        """Fails whoever published to ``subject``."""
        for box in list(self._boxes.values()):
            if box.subject.lower() == subject:
                box.put(error)

    def fail_all(self, error: DSecError) -> None:
        """Fails everyone who waits."""
        for box in list(self._boxes.values()):
            box.put(error)

    @contextmanager
    def mailbox(self, subject: str) -> Iterator[Mailbox]:
        """A mailbox for the answers to a message on ``subject``."""
        self._count += 1
        box = Mailbox(subject, f"{self._prefix}{self._count}")
        self._boxes[box.address] = box
        try:
            yield box
        finally:
            del self._boxes[box.address]

    def get_subject(self, project: str, entity: str, verb: str) -> str:
        """The subject of a read of ours."""
        return get(project, entity, verb, self.link.config.principal)

    def req_subject(self, project: str, entity: str, verb: str) -> str:
        """The subject of a stored request of ours."""
        return req(project, entity, verb, self.link.config.principal)

    def put_subject(self, project: str, entity: str, verb: str) -> str:
        """The subject of a change of ours that no stream keeps."""
        return put(project, entity, verb, self.link.config.principal)

    async def read(
        self, subject: str, message: Any, type_: type[T], *, timeout_s: float = READ_S
    ) -> T:
        """The answer to a read. Raises the typed error; ``Unavailable`` when nobody
        answered in time."""
        data, clock = encode(message), Attempts(timeout_s)
        while True:
            try:
                with self.mailbox(subject) as box:
                    await self.link.publish(
                        subject, data, reply=box.address, headers=_trace.headers()
                    )
                    return answer(await box.next(clock.patience()), type_)
            except (NobodyListens, TimeoutError) as exc:
                await clock.pause(exc, f"no answer to {subject}")
            except Unavailable as exc:
                if not exc.retryable:
                    raise
                await clock.pause(exc, f"no answer to {subject}")

    async def store(
        self, subject: str, data: bytes, *, reply_to: str, timeout_s: float = CHANGE_S
    ) -> None:
        """Returns when the server has stored the message, once. Raises ``Forbidden``,
        ``InvalidRequest``, ``Unavailable``."""
        headers = _trace.headers({HEADER_REPLY: reply_to, "Nats-Msg-Id": _ids.new()})
        clock = Attempts(timeout_s)
        with self.mailbox(subject) as box:
            while True:
                try:
                    await self.link.publish(subject, data, reply=box.address, headers=headers)
                    ack = decode(await box.next(clock.patience()), _PubAck)
                    if ack.error is None:
                        return
                    raise Unavailable(f"not stored: {ack.error.get('description', ack.error)}")
                except (NobodyListens, TimeoutError) as exc:
                    await clock.pause(exc, f"not stored: {subject}")
                except Unavailable as exc:
                    if not exc.retryable:
                        raise
                    await clock.pause(exc, exc.message)

    async def change(
        self,
        subject: str,
        message: Any,
        type_: type[T],
        *,
        timeout_s: float = CHANGE_S,
        resend_s: float = RESEND_S,
        done: Callable[[T], bool] | None = None,
        progress: Callable[[T], None] | None = None,
    ) -> T:
        """The (last) answer to a stored request, which is sent again with its request
        id while none comes. ``done`` tells the last answer from those before."""
        data, clock = encode(message), Attempts(timeout_s, try_s=resend_s)
        with self.mailbox(subject) as box:
            while True:
                await self.store(
                    subject, data, reply_to=box.address, timeout_s=clock.remaining()
                )
                try:
                    return await _last(box, type_, clock, done, progress)
                except TimeoutError as exc:
                    await clock.pause(exc, f"no answer to {subject}")


async def _last(
    box: Mailbox,
    type_: type[T],
    clock: Attempts,
    done: Callable[[T], bool] | None,
    progress: Callable[[T], None] | None,
) -> T:
    while True:
        found = answer(await box.next(clock.patience()), type_)
        if done is None or done(found):
            return found
        clock.alive()
        if progress is not None:
            progress(found)


class Attempts:
    """The clock of one call: how long to wait now, when to give up."""

    def __init__(self, timeout_s: float, *, try_s: float = TRY_S) -> None:
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._try_s = try_s
        self._backoff_s = BACKOFF_S

    def remaining(self) -> float:
        """Seconds left."""
        return max(self._deadline - time.monotonic(), 0.0)

    def patience(self) -> float:
        """Seconds to wait for an answer in this attempt."""
        return min(self._try_s, self.remaining())

    def alive(self) -> None:
        """There is progress: the time starts anew."""
        self._deadline = time.monotonic() + self.timeout_s

    async def pause(self, exc: Exception, text: str) -> None:
        """Waits before the next attempt; raises ``Unavailable`` when time is up."""
        wait_s = 0.0 if isinstance(exc, TimeoutError) else self._backoff_s
        if self.remaining() <= wait_s:
            raise Unavailable(f"{text} within {self.timeout_s:g} s") from exc
        counting.count("retried", "request")
        self._try_s = max(self._try_s, min(self._try_s * 2, MAX_TRY_S))
        self._backoff_s = min(self._backoff_s * 2, MAX_BACKOFF_S)
        await asyncio.sleep(wait_s)


def answer(data: bytes, type_: type[T]) -> T:
    """A reply, decoded. Raises the typed error of an error reply."""
    try:
        error = decode(data, _Probe).error
        if error is not None:  # at the top it means failure as a whole
            raise from_wire(error)
        return decode(data, type_)
    except BadMessage as exc:
        raise InternalError(f"the answer cannot be read: {exc}") from exc
