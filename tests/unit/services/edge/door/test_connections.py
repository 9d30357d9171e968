"""Connections at the door: frames of their own, silence, how many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.exec import CONNECT_WINDOW_BYTES, HANGUP_S
from services.edge.door import operation, signs
from services.edge.door.calls import Call
from services.edge.door.finished import Finished
from services.edge.door.ports import Connection, Room
from services.edge.door.signs import signs_of_life
from shared.clock import FakeClock
from shared.errors import CapacityExhausted, Conflict
from tests.unit.services.edge.frames import kind_of

CALL = Call("team", "n1", "u1", "connect", "alice")


class Wire:
    """A connection and what it sent: (subject, frame)."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str]] = []
        self.clock = FakeClock()
        self.connection = Connection(
            CALL, "op", hash_=b"h", reply_to="first", send=self.send, clock=self.clock
        )

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        self.sent.append((subject, kind_of(headers)))


async def test_a_client_that_comes_back_hears_of_the_end_of_output_again() -> None:
    wire = Wire()
    await wire.connection.connected()
    await wire.connection.output_ended()
    await wire.connection.attach("second")
    assert [frame for where, frame in wire.sent if where == "first"] == ["r", "a", "d"]
    assert [frame for where, frame in wire.sent if where == "second"] == ["r", "a", "d"]


async def test_a_slow_reader_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "STALL_S", 0.01)
    wire = Wire()
    work = asyncio.ensure_future(wire.connection.output("stdout", bytes(CONNECT_WINDOW_BYTES + 1)))
    await asyncio.sleep(0.1)
    assert not work.done()
    wire.connection.received("w", str(CONNECT_WINDOW_BYTES).encode())
    await work


async def test_a_silent_client_is_gone() -> None:
    wire = Wire()
    wire.clock.advance(HANGUP_S - 1)
    await wire.connection.keep_alive(3.0)
    assert not wire.connection.cancelled
    wire.connection.received("w", b"0")
    wire.clock.advance(HANGUP_S - 1)
    await wire.connection.keep_alive(3.0)
    assert not wire.connection.cancelled
    wire.clock.advance(2)
    await wire.connection.keep_alive(3.0)
    assert wire.connection.cancelled


async def test_a_client_that_lost_input_and_never_came_back_is_gone() -> None:
    wire = Wire()
    wire.connection.received("i", b"x", 5)  # what came before it is lost
    wire.clock.advance(HANGUP_S + 1)
    await wire.connection.keep_alive(3.0)
    assert wire.connection.cancelled


@pytest.mark.parametrize("why", ["no server", "this process stood still"])
async def test_whoever_could_not_be_heard_has_not_hung_up(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, turn = Wire(), asyncio.sleep
    link: Any = SimpleNamespace(is_up=True)
    leaps = [HANGUP_S + 1] if why == "this process stood still" else [1.0] * int(HANGUP_S + 5)
    leaps += [1.0] * int(HANGUP_S - 5)

    async def sleep(_seconds: float) -> None:
        if not leaps:
            raise asyncio.CancelledError
        wire.clock.advance(leaps.pop(0))
        link.is_up = why != "no server" or len(leaps) < HANGUP_S - 5
        await turn(0)

    monkeypatch.setattr(signs.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await signs_of_life(
            {("u1", "op"): wire.connection}, Finished(wire.clock), link, wire.clock
        )
    assert not wire.connection.cancelled
    leaps += [1.0] * 10
    with pytest.raises(asyncio.CancelledError):
        await signs_of_life(
            {("u1", "op"): wire.connection}, Finished(wire.clock), link, wire.clock
        )
    assert wire.connection.cancelled, "who is silent all the same has"


def test_a_known_connection_does_not_begin_again() -> None:
    async def ask() -> None:
        Wire().connection.asked_again((0, 0))

    with pytest.raises(Conflict) as caught:
        asyncio.run(ask())
    assert (caught.value.field, caught.value.details["errno"]) == ("port", "ECONNRESET")
    assert caught.value.is_infra, "nothing in the sandbox did it"


def test_room_counts_connections_of_each_sandbox() -> None:
    room = Room(2)
    other, command = Call("team", "n1", "u2", "connect", "a"), Call("team", "n1", "u1", "exec", "a")
    for call in (CALL, command, CALL, other, command):
        room.enter(call)
    assert (room.held("u1"), room.held("u2"), room.held("u3")) == (2, 1, 0)
    with pytest.raises(CapacityExhausted):
        room.enter(CALL)
    room.leave(command)
    room.leave(CALL)
    room.enter(CALL)
    for _ in range(2):
        room.leave(CALL)
    assert room.held("u1") == 0
