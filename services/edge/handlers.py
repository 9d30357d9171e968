"""Commands from the scheduler: from stored messages to the supervisor.

Owns: decoding, giving up. Does not own: what a command does.

A node may not publish dead letters (it may speak only as itself), so a message that it
gives up is logged here; the scheduler's reconciler finds the sandboxes that wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from schemas.base import BadMessage, decode
from schemas.sandbox import EdgeOp, EdgeStart
from schemas.streams import EDGE_DURABLE
from services.edge.supervisor import Command, Supervisor
from shared.consumer import Received
from shared.errors import InvalidRequest, Unavailable

log = logging.getLogger(__name__)

OPS = frozenset({"stop", "pause", "resume", "set_timeout", "tighten"})


class Commands:
    """The handler of the node's durable."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    async def __call__(self, batch: Sequence[Received]) -> None:
        """Accepts a batch as one commit."""
        commands = [c for c in map(_readable, batch) if c is not None]
        try:
            await self._supervisor.command(commands)
        except Unavailable:
            raise
        except Exception:
            # alone and for the last time: the consumer has tried it long enough
            if len(batch) > 1 or batch[0].deliveries < EDGE_DURABLE.max_deliver:
                raise
            log.exception("given up: message %d of %s", batch[0].stream_seq, batch[0].subject)


def _readable(message: Received) -> Command | None:
    try:
        return command(message.subject, message.data)
    except (BadMessage, InvalidRequest) as exc:
        log.error(
            "given up: message %d of %s, %d bytes: %s",
            message.stream_seq, message.subject, len(message.data), exc,
        )  # fmt: skip
        return None


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
