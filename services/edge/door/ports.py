"""Connections to ports of sandboxes at the door.

Owns: what makes a connection different from other operations (smaller windows, two
directions that end apart, no second beginning), how many there are in one sandbox. Does
not own: frames and flow (operation), reaching the port (the drivers').

A connection is not in the journal: it begins anew only for a client that has heard
nothing of it yet, and so has sent nothing into it. What was sent once is never sent into
another connection.
"""

from __future__ import annotations

from collections import Counter

from schemas.exec import CONNECT_WINDOW_BYTES, HEADER_OFFSET, ConnectReply, ConnectRequest
from services.edge.door.calls import Call
from services.edge.door.operation import Operation
from services.edge.drivers.base import Ports
from services.edge.sandbox.actor import Sandbox
from shared.errors import CapacityExhausted, Conflict, Unsupported

RETRY_AFTER_S = 1.0


class Connection(Operation):
    """The edge's side of one connection; the drivers' ``PortIO``. A client that is
    silent for ``HANGUP_S`` is gone, one that is slow is not."""

    window_bytes = CONNECT_WINDOW_BYTES
    retained_max_bytes = 0  # nobody joins
    may_stall = True
    terminal = True
    _output_over = False

    def asked_again(self, have: tuple[int, int]) -> None:
        """A client that knows the connection asks for it, and it is not here."""
        raise Conflict(
            "the connection broke off when the node's service restarted: make a new one",
            field="port", is_infra=True, details={"errno": "ECONNRESET"},
        )  # fmt: skip

    async def connected(self) -> None:
        """Tells the client, also one that came back while it waited."""
        await self.want_input()
        await self._send("a", b"0")

    async def output_ended(self) -> None:
        """The other end sends no more; it may still read."""
        async with self._sending:
            self._output_over = True
            await self._send("d", b"", {HEADER_OFFSET: str(self._sent)})

    async def attach(self, reply_to: str) -> None:
        await super().attach(reply_to)
        async with self._sending:
            if self._output_over and self.final is None:
                await self._send("d", b"", {HEADER_OFFSET: str(self._sent)})


class Room:
    """How many connections there are in each sandbox."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    def held(self, uid: str) -> int:
        """Connections of one sandbox."""
        return self._held[uid]

    def enter(self, call: Call) -> None:
        """One more, if it is a connection. Raises ``CapacityExhausted``."""
        if call.verb != "connect":
            return
        if self._held[call.uid] >= self._most:
            raise CapacityExhausted(
                f"{self._most} connections are open in this sandbox", field="port",
                retry_after_s=RETRY_AFTER_S,
            )  # fmt: skip
        self._held[call.uid] += 1

    def leave(self, call: Call) -> None:
        """One less, if it was a connection."""
        if call.verb == "connect":
            self._held[call.uid] -= 1
            self._held += Counter()  # those at zero go


async def run_connect(sandbox: Sandbox, request: ConnectRequest, op: Connection) -> ConnectReply:
    """``connect``: from the connection's making to the end of both directions."""
    driver = sandbox.driver
    if not isinstance(driver, Ports):
        raise Unsupported(f"backend {sandbox.backend} has no ports", field="backend")
    await driver.dial(sandbox.present(), request.port, op, wait_s=request.wait_s)
    return ConnectReply(op_id=op.op_id, sent=op.taken, received=op.streamed["o"])
