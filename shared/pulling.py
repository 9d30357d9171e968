"""One durable's messages, as they come.

Owns: requests to a durable, and which answer belongs to which request. Does not own: what
becomes of messages, when a subscription is made anew (:mod:`shared.consumer`).

nats-py's ``fetch`` has one address for all its requests. It takes the late end of one for the
end of the next, asks once more, and what is asked for and forgotten gets a later message, with
which it then waits out its time for others: of messages that came to a durable at rest, one
in a hundred was handled up to a second late. Here each request has an address of its own,
what waits waits for one message, and what is there is asked for without waiting.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from shared.errors import Unavailable

WAIT_S = 1.0
"""For a message to come, in one request."""
ANSWER_S = 1.0
"""For the server to say that a request is over."""
PAUSE_S = 0.1
"""After a request that the server does not take."""
PENDING_BYTES = 256 * 1024 * 1024
"""Of one batch; what is more would be dropped, and come again."""
_OVER = ("404", "408")  # nothing there; nothing came in time
_NOT_TAKEN = "409"


class Pull:
    """The messages of ``durable`` of ``stream``. Use: :meth:`open`, :meth:`next` …,
    :meth:`close`."""

    def __init__(self, client: Client, *, stream: str, durable: str) -> None:
        self._client = client
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = client.new_inbox()
        self._numbers = itertools.count()
        self._answers: Subscription | None = None

    async def open(self) -> None:
        self._answers = await self._client.subscribe(
            f"{self._inbox}.*", pending_bytes_limit=PENDING_BYTES
        )

    async def close(self) -> None:
        if self._answers is not None:
            await self._answers.unsubscribe()

    async def next(self, batch: int) -> list[Msg]:
        """Up to ``batch`` messages that are there, or the first one that comes within
        ``WAIT_S``, else none. Raises ``Unavailable`` where there is no JetStream, errors of
        nats-py."""
        there = await self._ask(batch, {"no_wait": True}, ANSWER_S)
        return there or await self._ask(1, {"expires": int(WAIT_S * 1e9)}, WAIT_S + ANSWER_S)

    async def _ask(self, batch: int, how: dict[str, Any], timeout_s: float) -> list[Msg]:
        assert self._answers is not None
        address = f"{self._inbox}.{next(self._numbers)}"
        request = json.dumps({"batch": batch} | how).encode()
        await self._client.publish(self._subject, request, reply=address)
        found: list[Msg] = []
        while len(found) < batch:
            try:
                message = await self._answers.next_msg(timeout_s)
            except TimeoutError:  # the connection was made anew meanwhile
                break
            status = (message.headers or {}).get("Status")
            if status is None:  # of a request that was given up, too
                found.append(message)
            elif message.subject == address and await _over(status, message):
                break
        return found


async def _over(status: str, message: Msg) -> bool:
    """Whether a request ends with this. Raises ``Unavailable``."""
    if status == _NOT_TAKEN:
        await asyncio.sleep(PAUSE_S)
    elif status not in _OVER:
        what = (message.headers or {}).get("Description", "")
        raise Unavailable(f"bus: a durable answers {status} {what}".rstrip())
    return True
