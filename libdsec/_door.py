"""All operations of one connection at the doors of edges.

Owns: the one subscription on which every operation's frames come, telling them
apart by the last token of the subject, looking for silence. Does not own: an operation's life
(:mod:`libdsec._operation`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any

from nats.aio.msg import Msg

from libdsec import counting
from libdsec._flow import count_of
from libdsec._link import Link, status
from libdsec._operation import Operation
from libdsec._wire import HEADER_FRAME, HEADER_OFFSET, HEADER_SOURCE, out
from libdsec.errors import DSecError, Unavailable

TICK_S = 0.5


class Operations:
    """All operations of a link: one subscription, told apart by the last token."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._live: dict[str, Operation[Any]] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[Any]] = set()
        principal, connection = link.config.principal, link.connection
        link.subscribe(out("*", principal, connection, "*"), self._on_frame)

    def add(self, operation: Operation[Any]) -> None:
        """From now on frames find the operation."""
        self._live[operation.token] = operation
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    def remove(self, operation: Operation[Any]) -> None:
        """The operation is over."""
        if self._live.get(operation.token) is operation:
            del self._live[operation.token]

    def rename(self, operation: Operation[Any], token: str) -> None:
        """The operation is asked for again: frames under the old token are nobody's from
        now on."""
        counting.count("retried", "operation")
        if self._live.pop(operation.token, None) is operation:
            self._live[token] = operation
        operation.token = token

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Runs ``work`` in the background; :meth:`close` waits for none of it."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _on_frame(self, message: Msg) -> None:
        operation = self._live.get(message.subject.rpartition(".")[2])
        if operation is None:
            return
        if status(message) == "503":
            operation.nobody()
            return
        headers = message.headers or {}
        kind = headers.get(HEADER_FRAME, "x")
        if HEADER_SOURCE in headers:
            operation.source = {HEADER_SOURCE: headers[HEADER_SOURCE]}
        operation.on_frame(kind, message.data, count_of(headers.get(HEADER_OFFSET)))

    async def _tick(self) -> None:
        """Looks for operations gone silent; ends when there are none."""
        while self._live:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            for operation in list(self._live.values()):
                operation.tick(now)
        self._ticker = None

    def reattach(self) -> None:
        """After a reconnect: frames may be lost, so every operation asks again."""
        for operation in list(self._live.values()):
            operation.reattach()

    def refuse(self, subject: str, error: DSecError) -> None:
        """Fails operations whose subject the server refused."""
        for operation in list(self._live.values()):
            if operation.subject.lower() == subject or operation.io_subject.lower() == subject:
                operation.fail(error)

    def fail_all(self, error: DSecError) -> None:
        """Fails every operation."""
        for operation in list(self._live.values()):
            operation.fail(error)

    def close(self) -> None:
        """Ends everything."""
        self.fail_all(Unavailable("the client is closed", retryable=False))
        for task in (*self._background, self._ticker):
            if task is not None:
                task.cancel()
