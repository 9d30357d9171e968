"""What has arrived for one operation of an agent and is not taken yet.

Owns: its order and its bound. Does not own: who takes it, credit
(:mod:`services.edge.agent.client`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

from services.edge.agent import wire
from services.edge.agent.wire import Msg, ProtocolError

HELD_BYTES_MAX = 2 * wire.WINDOW_BYTES  # of one operation: the credit of both streams
EVENTS_MAX = 4096  # of one operation, however small
OnNote = Callable[[int], Awaitable[None]]
BULK_BYTES = 4096  # from this size on output is handed on without another copy


class Inflight:
    """What has arrived for one operation: output until its end, then the end."""

    def __init__(self, op_id: int) -> None:
        self.id = op_id
        self.events: deque[tuple[int, Any]] = deque()
        self.ready = asyncio.Event()
        self.held_bytes = 0
        self.output_bytes = 0
        self.consumed = {wire.STDOUT: 0, wire.STDERR: 0}  # without credit for it
        self.stdin_credit = wire.WINDOW_BYTES
        self.credit_changed = asyncio.Event()
        self.on_note: OnNote | None = None

    def put(self, type_: int, value: Any) -> None:
        if len(self.events) > EVENTS_MAX and type_ != Msg.ERROR:
            raise ProtocolError("more frames than an operation has")
        self.events.append((type_, value))
        self.ready.set()

    def put_data(self, payload: bytes) -> None:
        """Raises :class:`ProtocolError` when the agent sends more than its credit."""
        self.held_bytes += len(payload) - 1
        if self.held_bytes > HELD_BYTES_MAX:
            raise ProtocolError("more output than credit")
        self.put(Msg.DATA, payload)

    async def next(self) -> tuple[int, Any]:
        while not self.events:
            self.ready.clear()
            await self.ready.wait()
        type_, value = self.events.popleft()
        if type_ == Msg.DATA:
            self.held_bytes -= len(value) - 1
        return type_, value


def data_of(payload: bytes) -> bytes:
    """The data of a DATA payload: of a large one a view, which is as good as bytes to
    whoever copies it or joins it."""
    return payload[1:] if len(payload) < BULK_BYTES else cast(bytes, memoryview(payload)[1:])
