"""Commands from the scheduler: from stored messages to the supervisor.

Owns: decoding. Does not own: what a command does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from schemas.base import decode
from schemas.sandbox import EdgeOp, EdgeStart
from services.edge.supervisor import Command, Supervisor
from shared.consumer import Received
from shared.errors import InvalidRequest

log = logging.getLogger(__name__)

OPS = frozenset({"stop", "pause", "resume", "set_timeout"})


class Commands:
    """The handler of the node's durable."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def __call__(self, batch: Sequence[Received]) -> None:
        """Accepts a batch as one commit. A message that can't be read raises, and is
        then given up alone."""
        await self._supervisor.command([command(m.subject, m.data) for m in batch])


def command(subject: str, data: bytes) -> Command:
    """The command in ``dsec.cmd.v1.edge.<verb>.<node>``. Raises ``BadMessage`` or
    ``InvalidRequest``."""
    verb = subject.split(".")[4]
    if verb == "start":
        message = decode(data, EdgeStart)
        if any(not 0 <= item.spec < len(message.specs) for item in message.starts):
            raise InvalidRequest("a start names a spec that is not there", field="spec")
        return message
    if verb not in OPS:
        raise InvalidRequest(f"verb {verb!r} is unknown", field="verb")
    return verb, decode(data, EdgeOp)
