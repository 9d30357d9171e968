"""What has arrived from an agent for one operation and was not taken yet.

Owns: its bounds, which hold against a hostile agent. Does not own: the connection
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
MERGED_BYTES = 64 * 1024  # small pieces of output that wait become one of about this size
NOTES = frozenset({Msg.OK, Msg.EOF})  # of a connection: it is made; its output has ended
OnNote = Callable[[int], Awaitable[None]]
BULK_BYTES = 4096  # from this size on output is handed on without another copy


class Arriving:
    """What has arrived for one operation: output until its end, then the end."""

    def __init__(self, op_id: int) -> None:
        self.id = op_id
        self.events: deque[tuple[int, Any]] = deque()
        self._growing: dict[int, bytearray] = {}  # by stream, the newest that waits
        self._waiter: asyncio.Future[None] | None = None
        self.held_bytes = 0
        self.output_bytes = 0
        self.consumed = {wire.STDOUT: 0, wire.STDERR: 0}  # without credit for it
        self.stdin_credit = wire.WINDOW_BYTES
        self._credit_waiter: asyncio.Future[None] | None = None
        self.ended = False
        self.on_note: OnNote | None = None
        self._noted: set[int] | frozenset[int] = frozenset()

    def put(self, type_: int, value: Any) -> None:
        self.events.append((type_, value))
        _wake(self._waiter)

    def put_data(self, payload: bytes) -> None:
        """Raises :class:`ProtocolError` when the agent sends more than its credit, or
        output after the end."""
        if self.ended or payload[0] not in (wire.STDOUT, wire.STDERR):
            raise ProtocolError("output where there is none")
        self.held_bytes += len(payload) - 1
        if self.held_bytes > HELD_BYTES_MAX:
            raise ProtocolError("more output than credit")
        waits = self._growing.get(payload[0])
        if waits is not None and len(waits) < MERGED_BYTES:
            waits += memoryview(payload)[1:]
        elif self.events and len(payload) < MERGED_BYTES:
            grows = bytearray(payload)
            self._growing[payload[0]] = grows
            self.put(Msg.DATA, grows)
        else:
            self._growing.pop(payload[0], None)
            self.put(Msg.DATA, payload)

    def put_end(self, type_: int, value: Any) -> None:
        """Raises :class:`ProtocolError` for a second end."""
        if self.ended:
            raise ProtocolError("an operation ends once")
        self.ended = True
        self.put(type_, value)

    def put_note(self, type_: int) -> None:
        """Raises :class:`ProtocolError` for one that comes twice, late or unasked."""
        if self.ended or self.on_note is None or type_ in self._noted:
            raise ProtocolError(f"a frame of type {type_}")
        self._noted |= {type_}
        self.put(type_, None)

    def add_credit(self, payload: bytes) -> None:
        """Raises :class:`ProtocolError` for more credit than there is room anywhere."""
        self.stdin_credit += int.from_bytes(payload[1:], "little")
        if payload[0] != wire.STDIN or self.stdin_credit > wire.WINDOW_BYTES:
            raise ProtocolError("more credit than a window")
        self.look_at_credit()

    def look_at_credit(self) -> None:
        """Whoever waits for more credit goes on."""
        _wake(self._credit_waiter)

    async def credit(self) -> None:
        """Returns when there is more, or nobody left to give it. For one at a time."""
        self._credit_waiter = asyncio.get_running_loop().create_future()
        await self._credit_waiter

    async def next(self) -> tuple[int, Any]:
        """What arrived next. For one at a time."""
        while not self.events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        type_, value = self.events.popleft()
        if type_ == Msg.DATA:
            self.held_bytes -= len(value) - 1
            stream = value[0]
            if self._growing.get(stream) is value:
                del self._growing[stream]
        return type_, value


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


def data_of(payload: bytes) -> bytes:
    """The data of a DATA payload: of a large one a view, which is as good as bytes to
    whoever copies it or joins it."""
    return payload[1:] if len(payload) < BULK_BYTES else cast(bytes, memoryview(payload)[1:])
