"""The service's Unix socket: what edges and the next keeper ask.

Owns: the messages, one question and one answer a connection, descriptors that go with an
answer. Does not own: what the answers mean. The socket is below a folder for root alone, so
whoever reaches it is trusted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec

from services.edge.layers.faults import Fault

log = logging.getLogger(__name__)

NAME = "control.sock"
MESSAGE_BYTES_MAX = 1024 * 1024
ASKED_S = 5.0
"""For a question to arrive whole."""
BACKLOG = 64


class Question(msgspec.Struct):
    """``prepare``: make ``digests`` mountable. ``mount``: the folder's descriptor.
    ``faults``: those after a number; ``traces``: what of layers was read, likewise.
    ``stats``: counters; ``fetched``: bytes of each of ``digests``. ``hand_over``: both
    descriptors, and end."""

    ask: Literal["prepare", "mount", "faults", "traces", "stats", "fetched", "hand_over"]
    digests: list[str] = []
    after: int = 0


class Trace(msgspec.Struct):
    """What the first reader of a layer needed, in units of ``unit_bytes``."""

    number: int
    digest: str
    unit_bytes: int
    units: list[int]


class Place(msgspec.Struct):
    """A layer on this node; ``has_data``: it also has a file in the service's folder."""

    digest: str
    meta: str
    has_data: bool


class Answer(msgspec.Struct):
    """``connection`` names the FUSE connection: with another one, earlier descriptors
    and mounts are of no use any more. ``error``: code and message."""

    connection: str = ""
    places: list[Place] = []
    faults: list[Fault] = []
    traces: list[Trace] = []
    stats: dict[str, int] = {}
    error: tuple[str, str] | None = None


Handler = Callable[[Question], Awaitable[tuple[Answer, list[int]]]]


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A name for the socket that fits into an address however long its folder's is."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)


class Control:
    """The listening socket."""

    def __init__(self, folder: Path, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        (folder / NAME).unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(folder) as address:
            self._socket.bind(address)
        self._socket.listen(BACKLOG)
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(), name="control")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._socket)
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                async with asyncio.timeout(ASKED_S):
                    question = msgspec.json.decode(await _line(connection), type=Question)
                answer, fds = await self._handler(question)
                data = msgspec.json.encode(answer) + b"\n"
                if fds:
                    socket.send_fds(connection, [data], fds)
                else:
                    await asyncio.get_running_loop().sock_sendall(connection, data)
            except (OSError, TimeoutError, msgspec.DecodeError) as error:
                log.debug("a question was not answered: %s", error)

    async def close(self) -> None:
        self._accepting.cancel()
        self._socket.close()
        await asyncio.gather(self._accepting, *self._tasks, return_exceptions=True)


async def _line(connection: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while not data.endswith(b"\n"):
        piece = await loop.sock_recv(connection, 65536)
        if not piece or len(data) > MESSAGE_BYTES_MAX:
            raise OSError("the question was cut")
        data += piece
    return data


def ask(folder: Path, question: Question, *, timeout_s: float) -> tuple[Answer, list[int]]:
    """Asks the service at ``folder`` and waits. Raises :class:`OSError`; the descriptors are
    the caller's to close."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        with _short(folder) as address:
            connection.connect(address)
        connection.sendall(msgspec.json.encode(question) + b"\n")
        data, fds = b"", []
        while not data.endswith(b"\n"):
            piece, came, _, _ = socket.recv_fds(connection, 65536, 4, socket.MSG_CMSG_CLOEXEC)
            fds += came
            if not piece or len(data) > MESSAGE_BYTES_MAX:
                for fd in fds:
                    os.close(fd)
                raise OSError("the answer was cut")
            data += piece
    return msgspec.json.decode(data, type=Answer), fds
