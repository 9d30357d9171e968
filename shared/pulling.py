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
from collections import deque
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError

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
        self._came: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._stopping = self._closed = False
        self._asked: str | None = None  # the address of a request that is not over

    async def open(self) -> None:
        self._answers = await self._client.subscribe(
            f"{self._inbox}.*", cb=self._take, pending_bytes_limit=PENDING_BYTES
        )

    async def _take(self, message: Msg) -> None:
        if not self._closed:
            self._came.append(message)
            self._wake.set()
        elif _status(message) is None:
            await message.nak()
        elif message.subject == self._asked:
            await self._forget()

    def stop(self) -> None:
        """Has :meth:`next` wait for nothing more that may not come."""
        self._stopping = True
        self._wake.set()

    async def close(self) -> list[Msg]:
        """Ends; returns what came and nobody took. A request that waits cannot be taken back:
        what the server has for it goes to others, until it is over or the connection is."""
        self._closed = True
        left = [message for message in self._came if _status(message) is None]
        self._came.clear()
        if self._asked is None or not self._client.is_connected:
            await self._forget()
        return left

    async def _forget(self) -> None:
        answers, self._answers = self._answers, None
        if answers is not None:
            await answers.unsubscribe()

    async def next(self, batch: int) -> list[Msg]:
        """Up to ``batch`` messages that are there, or the first one that comes within
        ``WAIT_S`` unless it is to stop, else none. Raises ``Unavailable`` where there is no
        JetStream, errors of nats-py."""
        there = await self._ask(batch, {"no_wait": True}, ANSWER_S)
        if there or self._stopping:
            return there
        how = {"expires": int(WAIT_S * 1e9)}
        return await self._ask(1, how, WAIT_S + ANSWER_S, stops=True)

    async def _ask(
        self, batch: int, how: dict[str, Any], timeout_s: float, *, stops: bool = False
    ) -> list[Msg]:
        address = f"{self._inbox}.{next(self._numbers)}"
        request = json.dumps({"batch": batch} | how).encode()
        self._asked = address
        await self._client.publish(self._subject, request, reply=address)
        found: list[Msg] = []
        while len(found) < batch:
            if not self._came:
                if self._stopping and (stops or not self._client.is_connected):
                    return found
                try:
                    await self._more(timeout_s)
                except TimeoutError:  # the connection was made anew meanwhile
                    return found
                continue
            message = self._came.popleft()
            status = _status(message)
            if status is None:  # of a request that was given up, too
                found.append(message)
            elif message.subject == address and await _over(status, message):
                break
        self._asked = None
        return found

    async def _more(self, timeout_s: float) -> None:
        if self._client.is_closed:
            raise ConnectionClosedError
        self._wake.clear()
        async with asyncio.timeout(timeout_s):
            await self._wake.wait()


def _status(message: Msg) -> str | None:
    return (message.headers or {}).get("Status")


async def _over(status: str, message: Msg) -> bool:
    """Whether a request ends with this. Raises ``Unavailable``."""
    if status == _NOT_TAKEN:
        await asyncio.sleep(PAUSE_S)
    elif status not in _OVER:
        what = (message.headers or {}).get("Description", "")
        raise Unavailable(f"bus: a durable answers {status} {what}".rstrip())
    return True
