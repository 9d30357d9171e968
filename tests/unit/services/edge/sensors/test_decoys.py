"""A decoy made ahead of need: the sandbox's, with its socket, or nobody's."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from services.edge.sensors import decoys


def call(decoy: Path) -> None:
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(decoy / decoys.SOCKET))


async def called(decoy: Path, sock: socket.socket | None) -> None:
    """Somebody calls, and is heard."""
    heard: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
    listener = decoys.Listener(decoy, lambda *who: heard.set_result(who), sock)
    call(decoy)
    assert (await asyncio.wait_for(heard, 60))[0] > 0
    listener.close()


async def test_a_spare_is_taken_with_its_socket(tmp_path: Path) -> None:
    spare = decoys.make_spare(tmp_path / "spare")
    (tmp_path / "u1").mkdir()
    made, sock = decoys.take(spare, tmp_path / "u1")
    assert sock is not None and spare.sock is None
    call(made)  # from here on, whoever listens
    await called(made, sock)
    assert sorted(p.name for p in made.iterdir()) == ["aether.sock", "chronus.log", "result.json"]


async def test_where_there_is_none_one_is_made(tmp_path: Path) -> None:
    spare = decoys.make_spare(tmp_path / "no" / "folder")
    assert spare.sock is None
    (tmp_path / "u1").mkdir()
    made, sock = decoys.take(spare, tmp_path / "u1")
    assert sock is None
    await called(made, sock)
    await called(made, None)  # after a restart of the edge


def test_nobody_calls_at_one_that_was_not_needed(tmp_path: Path) -> None:
    spare = decoys.make_spare(tmp_path / "spare")
    spare.close()
    spare.close()
    with pytest.raises(ConnectionRefusedError):
        call(tmp_path / "spare")
