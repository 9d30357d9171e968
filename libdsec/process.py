"""Commands: one-shot results and processes that are talked to.

Owns: collecting, per-stream reading, input, limits that the caller keeps. Does not
own: the stream protocol (:mod:`libdsec._operation`) or the request's making
(:mod:`libdsec.sandbox`).

A command's time limit is kept inside the sandbox; the call itself ends by silence
of the node, never by a clock of its own, until MARGIN_S after that limit.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
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
from libdsec.results import ExecResult, TextView

MARGIN_S = 30.0
"""How long after a command's time limit its result is waited for."""
PAUSED_LOOK_S = 0.5
"""How often the clocks of a command are looked at while its sandbox is paused."""
UNREAD_BYTES = WINDOW_BYTES // 2
"""What one stream may hold unread while the other is read; older bytes are dropped
and counted in ``truncated``, so that an unread stream never stops the command."""

OnOutput = Callable[[str, bytes], Awaitable[None] | None]
"""Called with ``"stdout"`` or ``"stderr"`` and the bytes as they come."""

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
    stdin: bytes | None = None,
    timeout_s: float | None = None,
    idle_timeout_s: float | None = None,
    on_output: OnOutput | None = None,
) -> ExecResult:
    """Runs a started operation to its end. Whoever cancels this kills the command."""
    feeding = asyncio.create_task(_feed(operation, stdin)) if stdin is not None else None
    parts: dict[str, list[bytes]] = {"o": [], "e": []}
    limit = _Limit(operation, timeout_s, idle_timeout_s)
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
    return _replaced(result, timed_out=True) if limit.idled else result


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


async def _feed(operation: Operation[ExecReply], data: bytes) -> None:
    try:
        await operation.send(data)
        await operation.end_input()
    except StdinClosed:
        pass  # the command ended without reading it all, as commands may


class _Limit:
    """The clocks that the caller keeps: idleness, and the last resort after the
    command's own limit. They stand still while the sandbox does."""

    def __init__(
        self, operation: Operation[Any], timeout_s: float | None, idle_s: float | None
    ) -> None:
        self._operation = operation
        self._idle_s = idle_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s + MARGIN_S
        self.idled = False
        self._last_output, self._stood_s = operation.last_output, 0.0

    async def wait(self) -> None:
        """Until something changed or a clock ran out. Raises ``DeadlineExceeded``
        when the result stays away long after the command's limit."""
        wait_s = self._wait_s()
        if wait_s is None:
            await self._operation.changed()
            return
        try:
            async with asyncio.timeout(wait_s):
                await self._operation.changed()
        except TimeoutError:
            await self._ran_out()

    def _wait_s(self) -> float | None:
        now = time.monotonic()
        ends = [end - now for end in (self._ends(now), self._idles(now)) if end is not None]
        least_s = PAUSED_LOOK_S if self._operation.stood.now else 0.0
        return max(min(ends), least_s) if ends else None

    def _ends(self, now: float) -> float | None:
        return None if self._end is None else self._end + self._operation.stood.seconds(now)

    def _idles(self, now: float) -> float | None:
        if self._idle_s is None or self.idled:
            return None
        stood_s = self._operation.stood.seconds(now)
        if self._operation.last_output != self._last_output:
            self._last_output, self._stood_s = self._operation.last_output, stood_s
        return self._last_output + self._idle_s + stood_s - self._stood_s

    async def _ran_out(self) -> None:
        now = time.monotonic()
        end, idle = self._ends(now), self._idles(now)
        if end is not None and now >= end:
            raise DeadlineExceeded("the command's result did not come after its time limit")
        if idle is not None and now >= idle:
            self.idled = True
            await self._operation.cancel()


def _replaced(result: ExecResult, **changes: Any) -> ExecResult:
    values = {name: getattr(result, name) for name in ExecResult.__dataclass_fields__}
    return ExecResult(**(values | changes))


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
        self.stdout = Output(self, "o")
        self.stderr = Output(self, "e")

    def __repr__(self) -> str:
        state = "over" if self._operation.done else "running"
        return f"Process({self._command!r}, op_id={self.op_id!r}, {state})"

    @property
    def op_id(self) -> str:
        """The operation's id: the same id never runs twice."""
        return self._operation.op_id

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
        """Sends a signal (``"TERM"``, ``"SIGINT"``, 15) to the command; one that comes
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
        data = self._unread[kind].popleft()
        self._unread_bytes[kind] -= len(data)
        await self._operation.taken(len(data))
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
