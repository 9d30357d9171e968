"""Connections of an agent in terms of the port's ``Ports`` and ``Accepting``.

Owns: reaching TCP ports of a sandbox through its agent, for every backend that has one.
Does not own: the connect itself, which the agent does in the sandbox's own network.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from services.edge.agent import wire
from services.edge.agent.client import AgentClient, Control
from services.edge.agent.commands import Defaults
from services.edge.agent.wire import Msg, Tag
from services.edge.drivers.base import Handle, PortIO
from shared.errors import DsecError

CONNECT_S = 10.0
"""How long a listener may take to accept a connection."""


async def dial(agent: AgentClient, port: int, io: PortIO, *, wait_s: float = 0.0) -> None:
    """One connection from its making to the end of both directions; see
    :meth:`services.edge.drivers.base.Ports.dial`. Cancelling resets it."""
    payload = (
        wire.field(Tag.PORT, port)
        + wire.field(Tag.TIMEOUT_NS, int(CONNECT_S * 1e9))
        + wire.field(Tag.WAIT_NS, int(wait_s * 1e9))
    )
    await _connect(agent, payload, io)


async def accept(
    agent: AgentClient, port: int, io: PortIO, *, listens: asyncio.Event
) -> None:
    """One connection that begins inside, as :func:`dial`; waits for it without a bound.
    Sets ``listens`` once the agent listens, or cannot."""
    asked: list[asyncio.Task[None]] = []

    def ask(_send: object) -> None:
        asked.append(asyncio.create_task(_behind(agent, listens)))

    payload = wire.field(Tag.PORT, port) + wire.field(Tag.ACCEPT, 1)
    try:
        await _connect(agent, payload, io, control=ask)
    finally:
        for task in asked:
            task.cancel()


async def _behind(agent: AgentClient, reached: asyncio.Event) -> None:
    """Frames are taken in order: the answer to this one says that those before it were."""
    with contextlib.suppress(DsecError):
        await agent.list()
        reached.set()


async def _connect(
    agent: AgentClient, payload: bytes, io: PortIO, *, control: Control | None = None
) -> None:
    connected = asyncio.Event()

    async def on_output(_stream: int, data: bytes) -> None:
        await io.output("stdout", data)

    async def on_note(type_: int) -> None:
        if type_ == Msg.OK:
            connected.set()
            await io.connected()
        else:
            await io.output_ended()

    async def input() -> AsyncIterator[bytes]:
        await connected.wait()  # what came before would be lost
        async for chunk in io.input():
            yield chunk

    await agent.run(
        Msg.DIAL, payload, on_output, stdin=input(), control=control, on_note=on_note
    )


class PortsOfAgent:
    """Mixed into a driver that knows the agent of a handle."""

    def _agent(self, handle: Handle) -> tuple[AgentClient, Defaults]:
        raise NotImplementedError

    async def dial(self, handle: Handle, port: int, io: PortIO, *, wait_s: float = 0.0) -> None:
        await dial(self._agent(handle)[0], port, io, wait_s=wait_s)

    async def accept(
        self, handle: Handle, port: int, io: PortIO, *, listens: asyncio.Event
    ) -> None:
        await accept(self._agent(handle)[0], port, io, listens=listens)
