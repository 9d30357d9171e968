"""Operations at an edge's door: one request, a stream of frames, one final reply.

Owns: an operation's life over a link that may break: it re-attaches under the same
operation id and never asks for a second run. Does not own: what the operation is
(:mod:`libdsec.process`, :mod:`libdsec.files`) or flow arithmetic
(:mod:`libdsec._flow`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from libdsec import _flow, _ids, _trace
from libdsec._wire import (
    CHUNK_BYTES,
    HEADER_AGAIN,
    HEADER_FRAME,
    HEADER_HAVE,
    HEADER_OFFSET,
    HEADER_OP,
    KEEPALIVE_S,
    BadMessage,
    FileRequest,
    WireError,
    decode,
    encode,
    exec_,
    out,
)
from libdsec.errors import DSecError, InputLost, InternalError, StdinClosed, Unavailable, from_wire

if TYPE_CHECKING:
    from libdsec._door import Operations

SILENCE_S = 3 * KEEPALIVE_S
"""No frame for this long: ask again."""
UNREACHABLE_S = 60.0
"""No frame for this long in spite of asking: give up. What passes while nothing is asked (the
server is away, this process stands still) is no answer that did not come."""
RETRY_S = 0.1
MAX_RETRY_S = 2.0
"""Wait before asking again where nobody listened."""
MAX_ORDERS = 64
"""Signals kept to be sent again, while nothing was heard of the operation."""
CANCEL_S = 10.0
"""How long a cancelled operation is listened to, so that its end is seen."""

R = TypeVar("R", bound=msgspec.Struct)
Data = bytes | memoryview

Verdict = Callable[[], Awaitable[DSecError | None]]
"""Asks the services whether the sandbox still lives; its death, or ``None``."""


class Operation(Generic[R]):
    """One operation. ``request`` is what is sent, and sent again;
    ``reply_type`` is the final reply's. ``route``: project, node, uid. ``joining``: the
    operation was begun elsewhere, its output is wanted from this offset on."""

    def __init__(
        self,
        operations: Operations,
        route: tuple[str, str, str],
        *,
        verb: str,
        request: Any,
        reply_type: type[R],
        verdict: Verdict,
        joining: int | None = None,
    ) -> None:
        link = operations.link
        project, node, uid = route
        principal = link.config.principal
        self.op_id: str = request.op_id
        self.subject = exec_(project, node, uid, verb, principal)
        self.io_subject = exec_(project, node, uid, "io", principal)
        self.token = self.op_id if joining is None else _ids.new()
        self._reply_to = out(node, principal, link.connection, "").removesuffix(".")
        self._operations = operations
        self._link = link
        self._body = encode(request)
        self._type, self._verdict = reply_type, verdict
        self.terminal = joining is not None or getattr(request, "pty", None) is not None
        self.attended = self.terminal or isinstance(request, FileRequest)
        self.source: dict[str, str] = {}  # the header that names what is read
        self.marks: dict[str, str] = {}  # headers of every request
        self.receiving = _flow.Receiving() if joining is None else _flow.Receiving.at(joining)
        self._joining = joining is not None
        self._orders: list[tuple[str, bytes]] = []
        self._size: list[tuple[str, bytes]] = []
        self._heard = False
        self.sending, self.stood = _flow.Sending(), _flow.Stood()
        self._heard_at = self._asked_at = time.monotonic()
        self.output: deque[tuple[str, bytes]] = deque()
        self._final: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._changed = asyncio.Event()
        self._ready = self._repeat_input = self._input_ended = False
        self._asking: asyncio.Task[Any] | None = None
        self._retry_s, self._silences, self._unanswered_s = RETRY_S, 0, 0.0
        self._refusal: WireError | None = None

    def __repr__(self) -> str:
        return f"Operation({self.op_id}, {'over' if self._final.done() else 'live'})"

    @property
    def done(self) -> bool:
        """Whether the final reply (or failure) is there."""
        return self._final.done()

    async def start(self) -> None:
        """Sends the request. Raises what :meth:`Link.publish` raises."""
        self._operations.add(self)
        try:
            await self._ask()
        except BaseException:
            self._operations.remove(self)
            raise

    async def _ask(self, more: dict[str, str] | None = None) -> None:
        """Sends the request, always the same bytes: the edge knows a repeated one."""
        self._asked_at = time.monotonic()
        reply = f"{self._reply_to}.{self.token}"
        headers = _trace.headers({**self.marks, **(more or {})} or None)
        await self._link.publish(self.subject, self._body, reply=reply, headers=headers)

    async def _attach(self) -> None:
        """Asks again. Answers come under a new token, so that late ones to the old
        cannot be mistaken for them."""
        self._operations.rename(self, _ids.new())
        self._ready = False
        self._repeat_input = self._heard and not self._joining
        have = {HEADER_HAVE: self.receiving.counts, **self.source} if self._heard else {}
        await self._ask({HEADER_AGAIN: "1", **have})
        for kind, data in [*self._orders, *self._size]:  # sent in vain where nobody listened
            await self._io(kind, data)

    # -- what comes ------------------------------------------------------------

    def on_frame(self, kind: str, data: bytes, offset: int | None) -> None:
        """A frame of this operation."""
        if kind != "x":
            self._heard_at = time.monotonic()
            self._retry_s, self._silences, self._unanswered_s = RETRY_S, 0, 0.0
            self._heard = True
            self._orders.clear()
            if self._joining and kind not in ("r", "a"):
                self._joined(None)
        if kind in ("o", "e"):
            self._on_output(kind, data, offset)
        elif kind == "a":
            self._on_count(data)
        elif kind == "r":
            self._on_ready()
        elif kind == "x":
            self._on_final(data, offset)
        elif kind == "k":
            self.stood.told(data, self._heard_at)
            if self.attended:
                self._operations.spawn(self._still_here())

    async def _still_here(self) -> None:
        """A client that says nothing for long has hung up."""
        self.receiving.acked = self.receiving.taken
        await self._io("w", str(self.receiving.taken).encode())

    def _joined(self, taken: int | None) -> None:
        """What the first frames say of an operation begun elsewhere: the input that was
        taken so far, ``None`` where it takes no input."""
        self._joining = False
        if taken is None:
            self._input_ended = True
        else:
            self.sending.sent = self.sending.acked = taken
            self._ready = True
        self._changed.set()

    def _on_output(self, kind: str, data: bytes, offset: int | None) -> None:
        try:
            new = self.receiving.accept(data, offset, error=kind == "e")
        except _flow.Gap:
            return self.reattach()
        except _flow.Flood as exc:
            return self.fail(InternalError(f"the sandbox's node broke the rules: {exc}"))
        if new:
            self.output.append((kind, new))
            self._changed.set()

    def _on_count(self, data: bytes) -> None:
        if (count := _flow.count_of(data.decode("ascii", "replace"))) is None:
            return
        if self._joining:
            return self._joined(count)
        if not self._repeat_input:
            self.sending.acknowledge(count)
        elif self.sending.begin_at(count):
            self._repeat_input = False
            self._operations.spawn(self._send_again())
        else:
            self.fail(InputLost(f"the node has only {count} bytes of what was sent"))
        self._changed.set()

    def _on_ready(self) -> None:
        """The edge takes input; after a re-attach only once it said from where."""
        if not self._repeat_input and not self._joining:
            self._ready = True
            self._changed.set()

    def _on_final(self, data: bytes, total: int | None) -> None:
        try:
            reply = decode(data, self._type)
        except BadMessage as exc:
            return self.fail(InternalError(f"the final reply cannot be read: {exc}"))
        if not self.receiving.complete(total):
            self.reattach()
            return
        self._refusal = getattr(reply, "error", None)
        if self._refusal is not None and self._refusal.code == "unavailable":
            self.nobody()  # a node that is starting or ending: not the last word
            return
        self.finish(reply)

    def finish(self, reply: R) -> None:
        """It ends with this reply, unless it ended before."""
        if not self._final.done():
            self._final.set_result(reply)
        self._over()

    def fail(self, error: DSecError) -> None:
        """The operation ends with ``error``, unless it ended before."""
        if not self._final.done():
            self._final.set_exception(error)
            self._final.exception()  # a failure nobody asked for is no news for the loop
        self._over()

    def _over(self) -> None:
        self._operations.remove(self)
        self._changed.set()
        if self._asking is not None:
            self._asking.cancel()

    # -- silence ---------------------------------------------------------------

    def nobody(self) -> None:
        """Nobody listened to our request: the node is away, or the sandbox."""
        wait_s, self._retry_s = self._retry_s, min(self._retry_s * 2, MAX_RETRY_S)
        self._ask_later(wait_s)

    def reattach(self) -> None:
        """Asks again at once."""
        self._ask_later(0.0)

    def tick(self, now: float) -> None:
        """Asks again after silence."""
        silent_s = now - max(self._heard_at, self._asked_at)
        if silent_s > SILENCE_S and self._link.is_up:
            self._ask_later(0.0)

    def _ask_later(self, wait_s: float) -> None:
        if self._asking is None or self._asking.done():
            self._asking = self._operations.spawn(self._ask_again(wait_s))

    async def _ask_again(self, wait_s: float) -> None:
        """One more request, unless the sandbox is dead or time is up."""
        await asyncio.sleep(wait_s)
        self._silences += 1
        self._unanswered_s += min(time.monotonic() - self._asked_at, SILENCE_S)
        try:
            if self._silences > 1:
                dead = await self._verdict()
                if dead is not None:
                    self.fail(dead)
                    return
        except DSecError as exc:
            if not exc.retryable:
                self.fail(exc)
                return
        if self._unanswered_s >= UNREACHABLE_S:
            self.fail(self._given_up())
            return
        self._asking = None  # the answer may come, and call for another, while we still send
        try:
            await self._attach()
        except DSecError as exc:
            if not exc.retryable:
                self.fail(exc)

    def _given_up(self) -> DSecError:
        if self._refusal is not None:
            return from_wire(self._refusal)
        return Unavailable(f"the sandbox's node did not answer for {UNREACHABLE_S:g} s")

    # -- what goes -------------------------------------------------------------

    async def _io(self, kind: str, data: Data = b"", offset: int | None = None) -> None:
        headers = {HEADER_OP: self.op_id, HEADER_FRAME: kind}
        if offset is not None:
            headers[HEADER_OFFSET] = str(offset)
        await self._link.publish(self.io_subject, data, headers=headers)

    async def send(self, data: Data) -> None:
        """Sends input as fast as it is taken. Raises ``StdinClosed`` after its end."""
        view = data if isinstance(data, memoryview) else memoryview(bytes(data))
        while view:
            await self._until_room()
            chunk = view[: min(CHUNK_BYTES, self.sending.room)]
            offset = self.sending.push(chunk)
            await self._io("i", chunk, offset)
            view = view[len(chunk) :]

    async def _until_room(self) -> None:
        while True:
            if self._input_ended:
                raise StdinClosed("the input is closed")
            if self._final.done():
                raise StdinClosed("the operation is over")
            if self._ready and self.sending.room > 0:
                return
            await self.changed()

    async def end_input(self) -> None:
        """No more input. Idempotent."""
        while not self._ready and not self._final.done() and not self._input_ended:
            await self.changed()
        if not self._input_ended:
            self._input_ended = True
            if not self._final.done():
                await self._io("f", offset=self.sending.sent)

    async def _send_again(self) -> None:
        token = self.token
        for offset, chunk in self.sending.again():
            if self.token != token:
                return  # attached once more meanwhile
            await self._io("i", chunk, offset)
        if self._input_ended and not self._final.done():
            await self._io("f", offset=self.sending.sent)
        self._ready = True
        self._changed.set()

    async def signal(self, name: str) -> None:
        """Sends a signal to the command, by name without SIG."""
        if not self._final.done():
            data = name.encode()
            if not self._heard and len(self._orders) < MAX_ORDERS:
                self._orders.append(("s", data))
            await self._io("s", data)

    async def resize(self, rows: int, cols: int) -> None:
        """Tells the new size of the command's terminal."""
        if not self._final.done():
            self._size = [("z", f"{rows} {cols}".encode())]
            await self._io(*self._size[0])

    async def cancel(self) -> None:
        """Has the edge kill the command's tree; the final reply still comes."""
        if not self._final.done():
            await self._io("c")

    def abandon(self) -> None:
        """Cancels in the background: for a caller who was itself cancelled."""
        if not self._final.done():
            self._operations.spawn(self._cancelled())

    async def _cancelled(self) -> None:
        try:
            async with asyncio.timeout(CANCEL_S):
                while not self._final.done():
                    await self.cancel()
                    await asyncio.wait({self._final}, timeout=RETRY_S * 10)
        except (TimeoutError, DSecError):
            pass  # bounded: the command's own limits end it
        finally:
            self._operations.remove(self)

    # -- what the caller waits for ---------------------------------------------

    async def changed(self) -> None:
        """Returns when anything new may be there."""
        self._changed.clear()
        await self._changed.wait()

    async def taken(self, count: int) -> None:
        """The caller took ``count`` bytes of output: tells the edge when it is due."""
        total = self.receiving.take(count)
        if total is not None and not self._final.done():
            await self._io("w", str(total).encode())

    async def final(self) -> R:
        """The final reply; raises the operation's error. Does not cancel it."""
        return await asyncio.shield(self._final)
