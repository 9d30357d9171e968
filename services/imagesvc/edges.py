"""Asking an edge for a layer of a sandbox: imagesvc's side of the edge's door.

Owns: the request, its keep-alives, how long silence may last. Does not own: what is done
with the layer. An edge that is silent is not asked a second time here: the command comes
again when this fails, and begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib

from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from schemas.base import HEADER_FRAME, BadMessage, decode, encode
from schemas.control import PackReply, PackRequest
from schemas.exec import KEEPALIVE_S
from schemas.image import Origin
from schemas.subjects import exec_, out
from shared import ids, telemetry
from shared.bus import Bus
from shared.errors import Internal, Unavailable
from shared.wire import from_wire

SILENCE_S = 3 * KEEPALIVE_S
PRINCIPAL = "imagesvc"
"""Who asks, at the door: the person is in the layer's provenance."""
_FINAL = "x"


async def pack(bus: Bus, origin: Origin, project: str, request: PackRequest) -> PackReply:
    """The edge's answer. Raises its typed error, or ``Unavailable`` where it is silent."""
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    reply_to = out(origin.node, PRINCIPAL, ids.new(), request.op_id)
    subject = exec_(project, origin.node, origin.uid, "pack", PRINCIPAL)
    try:
        listening = await bus.client.subscribe(reply_to, cb=heard.put)
    except NatsError as error:
        raise Unavailable(f"bus: {error!r}") from error
    try:
        await bus.client.publish(
            subject, encode(request), reply=reply_to, headers=telemetry.headers() or None
        )
        return _answer(await _final(heard, origin.node))
    except NatsError as error:
        raise Unavailable(f"bus: {error!r}") from error
    finally:
        with contextlib.suppress(NatsError):  # with the connection it is gone too
            await listening.unsubscribe()


async def _final(heard: asyncio.Queue[Msg], node: str) -> bytes:
    while True:
        try:
            message = await asyncio.wait_for(heard.get(), SILENCE_S)
        except TimeoutError:
            text = f"node {node} is silent for {SILENCE_S:g} s"
            raise Unavailable(text, cause="node_lost", is_infra=True) from None
        # a last reply without anything before it comes without headers (docs/adr/0032)
        if (message.headers or {}).get(HEADER_FRAME, _FINAL) == _FINAL:
            return message.data


def _answer(data: bytes) -> PackReply:
    try:
        reply = decode(data, PackReply)
    except BadMessage as error:
        raise Internal(f"the edge's answer cannot be read: {error}") from error
    if reply.error is not None:
        raise from_wire(reply.error)
    return reply
