"""How a connection to an agent begins: greeting, and what the edge hands over once.

Owns: the greeting, descriptors of the workload's control groups, the socket on which the
agent listens from then on. Does not own: operations (:mod:`services.edge.agent.client`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.edge.agent import wire
from services.edge.agent.wire import Fields, Msg, ProtocolError, Tag
from shared.errors import DsecError, Unsupported, from_code

BACKLOG = 8
READ_BYTES = 65536
QUEUE_RETRY_S = 0.005


@dataclass(frozen=True, slots=True)
class CgroupFds:
    """Descriptors handed to the agent: ``cgroup.procs`` of every v1 hierarchy, the v2
    directory, the file with the ``oom_kill`` counter. The caller closes them."""

    v1: Sequence[int] = ()
    v2: int | None = None
    oom: int | None = None


@contextmanager
def _in_folder(path: Path) -> Iterator[str]:
    """A name of ``path`` through its folder's descriptor: socket paths end at 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


async def connect(sock: socket.socket, path: Path) -> None:
    """Connects to the socket at ``path``; raises ``OSError``. The event loop's own way takes
    a full queue of connections for one that is on its way, and returns unconnected."""
    with _in_folder(path) as name:
        while True:
            try:
                return sock.connect(name)
            except BlockingIOError:
                await asyncio.sleep(QUEUE_RETRY_S)


async def greet(sock: socket.socket, decoder: wire.FrameDecoder, generation: str | None) -> Fields:
    """The agent's greeting. Raises ``Unsupported`` for another version or generation."""
    hello = wire.frame(Msg.HELLO, 0, wire.MAGIC + wire.field(Tag.VERSION, wire.VERSION))
    await asyncio.get_running_loop().sock_sendall(sock, hello)
    got = (await _next_frames(sock, decoder))[0]
    if got.type != Msg.HELLO or not got.payload.startswith(wire.MAGIC):
        raise ProtocolError("no greeting")
    fields = Fields(got.payload[len(wire.MAGIC) :])
    version = fields.number(Tag.VERSION)
    if version != wire.VERSION:
        raise Unsupported(f"the agent speaks protocol version {version}", field="version")
    if generation is not None and fields.text(Tag.GENERATION) != generation:
        raise Unsupported("the agent belongs to another generation", field="generation")
    return fields


async def set_up(
    sock: socket.socket, decoder: wire.FrameDecoder, cgroups: CgroupFds, path: Path
) -> None:
    """Hands over the groups, and a listening socket that takes the place of the agent's
    own at ``path``: one made out here shows in no list of sockets in the sandbox."""
    fds = [*cgroups.v1, *(fd for fd in (cgroups.v2, cgroups.oom) if fd is not None)]
    payload = (
        wire.field(Tag.V1_COUNT, len(cgroups.v1))
        + wire.field(Tag.HAS_V2, int(cgroups.v2 is not None))
        + wire.field(Tag.HAS_OOM, int(cgroups.oom is not None))
        + wire.field(Tag.HAS_LISTENER, 1)
    )
    made = path.with_name(path.name + ".new")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        _listen(listener, made)
        socket.send_fds(sock, [wire.frame(Msg.SETUP, 0, payload)], [*fds, listener.fileno()])
        got = (await _next_frames(sock, decoder))[0]
        if got.type == Msg.ERROR:
            raise error_of(Fields(got.payload))
        if got.type != Msg.OK:
            raise ProtocolError("no answer to the set-up")
        made.rename(path)


async def send_along(transport: asyncio.Transport, frame: bytes, fds: Sequence[int]) -> None:
    """A frame with descriptors, past the transport, which can carry none: once nothing
    waits in it. Raises ``OSError`` where the peer does not read."""
    while transport.get_write_buffer_size():  # noqa: ASYNC110 - it tells of room, not of this
        await asyncio.sleep(QUEUE_RETRY_S)
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as sock:
        if socket.send_fds(sock, [frame], fds) != len(frame):
            transport.abort()
            raise ProtocolError("the agent does not read")


def _listen(listener: socket.socket, path: Path) -> None:
    path.unlink(missing_ok=True)
    with _in_folder(path) as name:
        listener.bind(name)
    path.chmod(0o600)
    listener.setblocking(False)
    listener.listen(BACKLOG)


async def _next_frames(sock: socket.socket, decoder: wire.FrameDecoder) -> list[wire.Frame]:
    while True:
        data = await asyncio.get_running_loop().sock_recv(sock, READ_BYTES)
        if not data:
            raise EOFError("the agent closed the connection")
        frames = decoder.feed(data)
        if frames:
            return frames


def error_of(fields: Fields) -> DsecError:
    """The typed error of an ERROR payload; its texts are data of the sandbox, bounded."""
    known = (("errno", Tag.ERRNO, 32), ("path", Tag.PATH, 4096))
    details = {name: fields.shown(tag, most) for name, tag, most in known if tag in fields}
    return from_code(
        fields.shown(Tag.CODE, 32), fields.shown(Tag.MESSAGE, 1024) or "failed",
        field=fields.shown(Tag.FIELD, 64) or None, details=details or None,
    )  # fmt: skip
