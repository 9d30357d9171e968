"""Listeners of denied calls: how many a sandbox may hold."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest

from services.edge.agent.asking import LISTENERS_MAX, Asking, Room


async def send(asking: Asking, fd: int) -> None:
    """Gives it one listener, and time to take it."""
    socket.send_fds(asking.theirs, [b"x"], [fd])
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ended", [True, False])
async def test_another_policy_gives_no_room_for_more_listeners(ended: bool) -> None:
    room = Room(2)
    first, second = Asking(lambda _: None, room), Asking(lambda _: None, room)
    ours, theirs = os.pipe()
    for _ in range(2):
        await send(first, ours)
    assert room.left == 0
    if ended:
        first.close()
    await send(second, ours)
    assert room.left == (1 if ended else 0)
    assert len(second._listeners) == (1 if ended else 0)
    if not ended:
        first.close()
    second.close()
    assert room.left == 2 <= LISTENERS_MAX
    os.close(ours)
    os.close(theirs)
