"""Commands: one-shot results and processes that are talked to.

Owns: collecting, per-stream reading, input, limits that the caller keeps. Does not
own: the stream protocol (:mod:`libdsec._operation`) or the request's making
(:mod:`libdsec.sandbox`).

A command's limits are kept inside the sandbox; the call itself ends by silence
of the node, never by a clock of its own, until MARGIN_S after that limit.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any

from libdsec._operation import Operation
from libdsec._wire import WINDOW_BYTES, ExecReply
from libdsec.errors import (
    DeadlineExceeded,
    ExecFailed,
    ExecTimeout,
    InvalidRequest,
    NotFound,
    StdinClosed,
    Unsupported,
    from_wire,
)
from libdsec.interaction import BUFFER_BYTES, Interaction
from libdsec.results import ExecResult, TextView

MARGIN_S = 30.0
"""How long after a command's time limit its result is waited for."""
PAUSED_LOOK_S = 0.5
"""How often the clocks of a command are looked at while its sandbox is paused."""
STOOD_S = 1.0
"""Later than this the margin's end finds that this process stood still."""
UNREAD_BYTES = WINDOW_BYTES // 2
"""What one stream may hold unread while the other is read; older bytes are dropped
and counted in ``truncated``, so that an unread stream never stops the command."""

OnOutput = Callable[[str, bytes], Awaitable[None] | None]
"""Called with ``"stdout"`` or ``"stderr"`` and the bytes as they come."""

Stdin = bytes | str | Iterable[bytes] | AsyncIterable[bytes]
"""Input of a command. A plain iterable is asked in a thread: it may block."""

NAMES = {"o": "stdout", "e": "stderr"}


def result_of(
    reply: ExecReply, stdout: bytes, stderr: bytes, *, dropped: tuple[int, int] = (0, 0)
) -> ExecResult:
    """The result of a final reply and what came before it. Raises its error."""
    if reply.error is not None:
        raise from_wire(reply.error)
    return ExecResult(
        exit_code=reply.exit_code,
        signal=reply.signal,
        stdout=stdout + reply.stdout,
        stderr=stderr + reply.stderr,
        timed_out=reply.timed_out,
        oom_killed=reply.oom_killed,
        truncated=(reply.truncated[0] + dropped[0], reply.truncated[1] + dropped[1]),
        duration_s=reply.duration_s,
        seq=reply.seq,
        op_id=reply.op_id,
        epoch=reply.epoch,
        session_fresh=reply.session_fresh,
        session_ended=reply.session_ended,
    )


def checked(result: ExecResult, command: str) -> ExecResult:
    """The result, or ``ExecTimeout`` or ``ExecFailed`` carrying it."""
    if result.timed_out:
        raise ExecTimeout(f"{command}: timed out after {result.duration_s:.1f} s", result)
    if result.exit_code != 0:
        how = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
        raise ExecFailed(f"{command}: {how}", result)
    return result


async def collect(
    operation: Operation[ExecReply],
    *,
    stdin: Stdin | None = None,
    timeout_s: float | None = None,
    on_output: OnOutput | None = None,
) -> ExecResult:
    """Runs a started operation to its end. Whoever cancels this kills the command."""
    feeding = asyncio.create_task(_feed(operation, stdin)) if stdin is not None else None
    if feeding is not None:
        feeding.add_done_callback(lambda task: _fed(operation, task))
    parts: dict[str, list[bytes]] = {"o": [], "e": []}
    limit = _Limit(operation, timeout_s)
    try:
        while True:
            await _drain(operation, parts, on_output)
            if operation.done:
                break
            await limit.wait()
        await _drain(operation, parts, on_output)
        result = result_of(await operation.final(), b"".join(parts["o"]), b"".join(parts["e"]))
    except BaseException:
        operation.abandon()
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
    if feeding is not None and feeding.done() and not feeding.cancelled():
        feeding.result()  # raises what the caller's own input raised
    return result


async def _drain(
    operation: Operation[ExecReply], parts: dict[str, list[bytes]], on_output: OnOutput | None
) -> None:
    while operation.output:
        kind, data = operation.output.popleft()
        parts[kind].append(data)
        await operation.taken(len(data))
        if on_output is not None:
            said = on_output(NAMES[kind], data)
            if inspect.isawaitable(said):
                await said


async def _feed(operation: Operation[ExecReply], source: Stdin) -> None:
    try:
        async for data in _chunks(source):
            await operation.send(data)
        await operation.end_input()
    except StdinClosed:
        pass  # the command ended without reading it all, as commands may


def _fed(operation: Operation[ExecReply], task: asyncio.Task[None]) -> None:
    """Input that fails is no input: the command is killed, not given a part of it."""
    if not task.cancelled() and task.exception() is not None:
        operation.abandon()


async def _chunks(source: Stdin) -> AsyncIterator[bytes]:
    if isinstance(source, bytes | bytearray | memoryview | str):
        yield source.encode() if isinstance(source, str) else bytes(source)
    elif isinstance(source, AsyncIterable):
        async for part in source:
            yield part
    else:
        parts = iter(source)
        while (found := await asyncio.to_thread(_next, parts)) is not None:
            yield found


def _next(parts: Iterator[bytes]) -> bytes | None:
    return next(parts, None)


class _Limit:
    """The last resort after the command's own limit. It stands still while the sandbox
    does."""

    def __init__(self, operation: Operation[Any], timeout_s: float | None) -> None:
        self._operation = operation
        self._end = None if timeout_s is None else time.monotonic() + timeout_s + MARGIN_S

    async def wait(self) -> None:
        """Until something changed. Raises ``DeadlineExceeded`` when the result stays away
        long after the command's limit. Where this process stood still the margin begins anew:
        what came meanwhile is not read yet."""
        if self._end is None:
            return await self._operation.changed()
        due = time.monotonic() + (wait_s := self._wait_s() or 0.0)
        try:
            async with asyncio.timeout(wait_s):
                await self._operation.changed()
        except TimeoutError:
            if (now := time.monotonic()) - due > STOOD_S:
                stood_s = self._operation.stood.seconds(now)
                self._end = max(self._end, now + MARGIN_S - stood_s)
            if not self._operation.done and (self._wait_s() or 0.0) <= 0.0:
                text = "the command's result did not come after its time limit"
                raise DeadlineExceeded(text) from None

    def _wait_s(self) -> float | None:
        if self._end is None:
            return None
        now, stood = time.monotonic(), self._operation.stood
        least_s = PAUSED_LOOK_S if stood.now else 0.0
        return max(self._end + stood.seconds(now) - now, least_s)


def _signal_name(number: int) -> str:
    """Raises ``InvalidRequest`` for a number that is no signal's."""
    if number == 0:
        return "0"
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        raise InvalidRequest(f"signal {number} is unknown", field="signal") from None


class Output:
    """One output stream of a process: an async iterator of bytes, in chunks as they
    came. Ends when the command has ended."""

    def __init__(self, process: Process, kind: str) -> None:
        self._process = process
        self._kind = kind

    def __repr__(self) -> str:
        return f"Output({NAMES[self._kind]} of {self._process!r})"

    def __aiter__(self) -> Output:
        return self

    async def __anext__(self) -> bytes:
        data = await self._process._next(self._kind)
        if data is None:
            raise StopAsyncIteration
        return data

    async def read(self) -> bytes:
        """All bytes to the end."""
        return b"".join([part async for part in self])

    async def text(self) -> AsyncIterator[str]:
        """The stream as text: UTF-8, decoded incrementally, bad bytes as U+FFFD."""
        view = TextView()
        async for part in self:
            if text := view.feed(part):
                yield text
        if text := view.feed(b"", final=True):
            yield text

    async def lines(self) -> AsyncIterator[str]:
        """The stream as lines of text without their ends."""
        rest = ""
        async for text in self.text():
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                yield line
        if rest:
            yield rest


class Process:
    """A command that runs. ``stdout`` and ``stderr`` are async iterators of bytes;
    read both, or make it with ``merge=True``, or call :meth:`wait`. On a terminal
    everything comes in ``stdout``."""

    def __init__(self, operation: Operation[ExecReply], *, command: str, stdin: bool) -> None:
        self._operation = operation
        self._command = command
        self._stdin_open = stdin
        self._unread: dict[str, deque[bytes]] = {"o": deque(), "e": deque()}
        self._unread_bytes = {"o": 0, "e": 0}
        self._dropped = {"o": 0, "e": 0}
        self._result: ExecResult | None = None
        self._tail_given: set[str] = set()
        self._counted: set[str] = set()  # streams whose oldest bytes were told as taken
        self.stdout = Output(self, "o")
        self.stderr = Output(self, "e")

    def __repr__(self) -> str:
        state = "over" if self._operation.done else "running"
        return f"Process({self._command!r}, op_id={self.op_id!r}, {state})"

    @property
    def op_id(self) -> str:
        """The operation's id: the same id never runs twice."""
        return self._operation.op_id

    def interact(self, *, buffer_bytes: int = BUFFER_BYTES) -> Interaction:
        """Talks to it by what it says on ``stdout``, instead of reading that otherwise."""
        return Interaction(self, buffer_bytes=buffer_bytes)

    async def write(self, data: bytes | str) -> None:
        """Sends input, as fast as the command reads. Raises ``StdinClosed`` after
        :meth:`close_stdin` or the command's end."""
        if not self._stdin_open:
            raise StdinClosed("stdin is closed")
        await self._operation.send(data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """End of input. Idempotent."""
        if self._stdin_open:
            self._stdin_open = False
            await self._operation.end_input()

    async def signal(self, name: str | int) -> None:
        """Sends a signal (``"TERM"``, ``"SIGINT"``, 15) to the command's process group:
        itself and what it started there. In a session it goes to what the command
        started, never to the shell, and INT is :meth:`Session.interrupt`. One that comes
        before the command has begun waits for it. 0 sends nothing: it raises ``NotFound``
        where the command is over."""
        text = str(name).upper().removeprefix("SIG")
        if text.isdigit():
            text = _signal_name(int(text))
        if text == "0" and self._operation.done:
            raise NotFound("the command is over")
        await self._operation.signal(text)

    async def resize(self, rows: int, cols: int) -> None:
        """Sets the size of the command's terminal, both 1 to 65535. Raises
        ``InvalidRequest`` for other sizes, ``Unsupported`` without a terminal."""
        if not self._operation.terminal:
            raise Unsupported("the command has no terminal", field="pty")
        if not (0 < rows < 1 << 16 and 0 < cols < 1 << 16):
            raise InvalidRequest("a terminal has 1 to 65535 rows and columns", field="pty")
        await self._operation.resize(rows, cols)

    async def kill(self) -> None:
        """Kills the command and everything it started."""
        await self._operation.cancel()

    async def wait(self, *, check: bool = False) -> ExecResult:
        """The result; output that was not read is in it. The exit is known only
        here, and always."""
        while not self._operation.done:
            self._sort()
            await self._trim(UNREAD_BYTES)
            await self._operation.changed()
        return checked(await self._end(), self._command) if check else await self._end()

    async def _end(self) -> ExecResult:
        if self._result is None:
            reply = await self._operation.final()
            self._sort()
            parts = {k: b"".join(v) for k, v in self._unread.items()}
            missed = self._operation.receiving.missed  # of both, known to neither
            dropped = (self._dropped["o"] + missed, self._dropped["e"])
            self._result = result_of(reply, parts["o"], parts["e"], dropped=dropped)
        return self._result

    def _sort(self) -> None:
        while self._operation.output:
            kind, data = self._operation.output.popleft()
            self._unread[kind].append(data)
            self._unread_bytes[kind] += len(data)

    async def _trim(self, limit: int, kinds: str = "oe") -> None:
        """Drops the oldest unread bytes over ``limit``, so that the command goes on."""
        for kind in kinds:
            while self._unread_bytes[kind] > limit:
                self._dropped[kind] += len(self._unread[kind][0])
                await self._pop(kind)

    async def _pop(self, kind: str) -> bytes:
        """The oldest bytes of a stream. A reader that is cancelled leaves them there."""
        data = self._unread[kind].popleft()
        self._unread_bytes[kind] -= len(data)
        if kind in self._counted:
            self._counted.discard(kind)
            return data
        try:
            await self._operation.taken(len(data))
        except asyncio.CancelledError:
            self._counted.add(kind)
            self._unread[kind].appendleft(data)
            self._unread_bytes[kind] += len(data)
            raise
        return data

    async def _next(self, kind: str) -> bytes | None:
        other = "e" if kind == "o" else "o"
        while True:
            self._sort()
            if self._unread[kind]:
                return await self._pop(kind)
            if self._operation.done:
                return await self._tail(kind)
            await self._trim(UNREAD_BYTES, other)
            await self._operation.changed()

    async def _tail(self, kind: str) -> bytes | None:
        """What came inside the final reply, once."""
        reply = await self._operation.final()
        if kind in self._tail_given:
            return None
        self._tail_given.add(kind)
        return (reply.stdout if kind == "o" else reply.stderr) or None

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if not self._operation.done:
            await self.kill()
            await self.wait()
