"""HTTP/1 requests through the gate, each of them seen and changed.

Owns: carrying requests and responses between two ends, in order, with their bodies as
they come, upgrades, and the gate's own refusals. Does not own: what is changed (the
caller's ``edit``), parsing (h11). A name that is allowed for a connection holds for each
request on it, which bytes that are only passed on would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import h11

from services.edge.egress.sides import Side

HEAD_MAX = 64 * 1024
SWITCHING = 101


class Refusal(Exception):
    """The gate answers instead: ``status`` and a line of text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


Edit = Callable[[h11.Request], Awaitable[h11.Request]]
Connect = Callable[[], Awaitable[Side]]


class Relay:
    """Requests of ``inner``, as ``edit`` leaves them, to what ``connect`` reaches at the
    first one, and the responses back."""

    def __init__(self, inner: Side, connect: Connect, edit: Edit) -> None:
        self._inner, self._connect, self._edit = inner, connect, edit
        self._outer: Side | None = None
        self._ahead: asyncio.Task[bytes] | None = None
        self._down = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_MAX)
        self._up = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_MAX)

    async def run(self) -> None:
        """Until one end has no more to say. Raises ``OSError`` where one broke."""
        try:
            while await self._one():
                self._down.start_next_cycle()
                self._up.start_next_cycle()
        except Refusal as refusal:
            await self._refuse(refusal)
        except h11.RemoteProtocolError as err:
            await self._refuse(Refusal(err.error_status_hint, "not HTTP/1 as the gate reads it"))
        except h11.LocalProtocolError as err:
            raise ConnectionError("the other end broke HTTP/1") from err
        finally:
            if self._ahead is not None:
                self._ahead.cancel()
        await self._inner.end()
        if self._outer is not None:
            await self._outer.end()

    async def _one(self) -> bool:
        """One request and its response; whether another may come."""
        event = await self._asked()
        if not isinstance(event, h11.Request):
            return False
        request = await self._edit(event)
        if self._outer is None:
            self._outer = await self._connect()
        await self._send(self._up, self._outer, request)
        body = asyncio.ensure_future(self._body(self._outer))
        try:
            switched = await self._response(self._outer)
            if not switched and not body.done():
                return False  # an answer before the question's end: nobody reads the rest
            await body
        finally:
            body.cancel()
            await asyncio.gather(body, return_exceptions=True)
        if switched:
            await self._pass_on(self._outer)
            return False
        return self._down.our_state is h11.DONE and self._up.their_state is h11.DONE

    async def _asked(self) -> object:
        """The next request; the end, too, where the host ends a connection that is idle:
        a client that asks on it would only see it break."""
        asking = asyncio.ensure_future(self._next(self._down, self._inner))
        if self._outer is None:
            return await asking
        self._ahead = asyncio.ensure_future(self._outer.read())
        try:
            await asyncio.wait({asking, self._ahead}, return_when=asyncio.FIRST_COMPLETED)
            if not self._ahead.done():
                return await asking
            self._ahead.exception()
            return h11.ConnectionClosed()
        finally:
            asking.cancel()

    async def _body(self, outer: Side) -> None:
        while True:
            event = await self._next(self._down, self._inner)
            if isinstance(event, h11.Data | h11.EndOfMessage):
                await self._send(self._up, outer, event)
            if not isinstance(event, h11.Data):
                return

    async def _response(self, outer: Side) -> bool:
        """Whether the connection is something else than HTTP from here on."""
        while True:
            event = await self._next(self._up, outer)
            if isinstance(event, h11.ConnectionClosed):
                raise ConnectionError("the other end closed without an answer")
            assert isinstance(
                event, h11.InformationalResponse | h11.Response | h11.Data | h11.EndOfMessage
            )
            await self._send(self._down, self._inner, event)
            if isinstance(event, h11.InformationalResponse) and event.status_code == SWITCHING:
                return True
            if isinstance(event, h11.Response) and self._up.their_state is h11.SWITCHED_PROTOCOL:
                return True
            if isinstance(event, h11.EndOfMessage):
                return False

    async def _pass_on(self, outer: Side) -> None:
        """Bytes, both ways, until both have ended."""

        async def carry(source: Side, target: Side, data: bytes) -> None:
            if data:
                await target.write(data)
            while data := await source.read():
                await target.write(data)
            await target.end()

        async with asyncio.TaskGroup() as group:
            group.create_task(carry(self._inner, outer, self._down.trailing_data[0]))
            group.create_task(carry(outer, self._inner, self._up.trailing_data[0]))

    async def _next(self, connection: h11.Connection, side: Side) -> object:
        while True:
            try:
                event = connection.next_event()
            except h11.RemoteProtocolError as err:
                if connection is self._down:
                    raise
                raise Refusal(502, "the host does not answer as HTTP/1 does") from err
            if event is not h11.NEED_DATA:
                return event
            if side is self._outer and self._ahead is not None:
                ahead, self._ahead = self._ahead, None
                connection.receive_data(await ahead)
            else:
                connection.receive_data(await side.read())

    async def _send(self, connection: h11.Connection, side: Side, event: h11.Event) -> None:
        data = connection.send(event)
        if data:
            await side.write(data)

    async def _refuse(self, refusal: Refusal) -> None:
        if self._down.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # a response has begun: it is cut, not mended
        text = f"gate: {refusal.text}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(text))),
            ("Connection", "close"),
        ]  # fmt: skip
        response = h11.Response(status_code=refusal.status, headers=headers)
        for event in (response, h11.Data(data=text), h11.EndOfMessage()):
            await self._send(self._down, self._inner, event)
