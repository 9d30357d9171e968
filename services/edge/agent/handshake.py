"""The beginning of a connection to an agent: who it is, and what it is handed over.

Owns: the socket's way there, greeting, set-up, the agent's errors as ours. Does not
own: operations (:mod:`services.edge.agent.client`).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.edge.agent import wire
from services.edge.agent.wire import Fields, Msg, ProtocolError, Tag
from shared.errors import DsecError, Unsupported, from_code


@dataclass(frozen=True, slots=True)
class CgroupFds:
    """Descriptors handed to the agent: ``cgroup.procs`` of every v1 hierarchy, the v2
    directory, the file with the ``oom_kill`` counter. The caller closes them."""

    v1: Sequence[int] = ()
    v2: int | None = None
    oom: int | None = None


def error_of(fields: Fields) -> DsecError:
    """The typed error of an ERROR payload; its texts are data of the sandbox, bounded."""
    known = (("errno", Tag.ERRNO, 32), ("path", Tag.PATH, 4096))
    details = {n: _shown(fields.text(tag))[:most] for n, tag, most in known if tag in fields}
    message = _shown(fields.text(Tag.MESSAGE, "failed"))[:1024]
    return from_code(
        fields.text(Tag.CODE), message,
        field=fields.text(Tag.FIELD)[:64] or None, details=details or None,
    )  # fmt: skip


def _shown(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


async def connect_path(sock: socket.socket, path: Path) -> None:
    """Connects through the folder's descriptor: socket paths end at 107 bytes."""
    loop = asyncio.get_running_loop()
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        await loop.sock_connect(sock, f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


async def _next_frames(sock: socket.socket, decoder: wire.FrameDecoder) -> list[wire.Frame]:
    while True:
        data = await asyncio.get_running_loop().sock_recv(sock, 65536)
        if not data:
            raise EOFError("the agent closed the connection")
        frames = decoder.feed(data)
        if frames:
            return frames


async def greet(sock: socket.socket, decoder: wire.FrameDecoder, generation: str | None) -> Fields:
    """What the agent says of itself. Raises ``Unsupported`` for another protocol version
    or ``generation``."""
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


async def set_up(sock: socket.socket, decoder: wire.FrameDecoder, cgroups: CgroupFds) -> None:
    """Hands over the workload's groups: the agent's launcher has joined them then."""
    fds = [*cgroups.v1, *(fd for fd in (cgroups.v2, cgroups.oom) if fd is not None)]
    payload = (
        wire.field(Tag.V1_COUNT, len(cgroups.v1))
        + wire.field(Tag.HAS_V2, int(cgroups.v2 is not None))
        + wire.field(Tag.HAS_OOM, int(cgroups.oom is not None))
    )
    socket.send_fds(sock, [wire.frame(Msg.SETUP, 0, payload)], fds)
    got = (await _next_frames(sock, decoder))[0]
    if got.type == Msg.ERROR:
        raise error_of(Fields(got.payload))
    if got.type != Msg.OK:
        raise ProtocolError("no answer to the set-up")
