"""What the edge asks of an agent: commands and file operations in terms of the port.

Owns: the translation between the driver port's types and fields. Does not own: the
connection (:mod:`services.edge.agent.client`). Used by every backend with an agent.
"""

from __future__ import annotations

import signal
import struct
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from services.edge.agent import wire
from services.edge.agent.client import AgentClient, Control, started
from services.edge.agent.listing import Listed
from services.edge.agent.wire import Fields, Msg, Tag
from services.edge.drivers.base import (
    ExecIO,
    ExecOutcome,
    ExecSpec,
    Resize,
    ResumeIO,
    Stream,
)  # fmt: skip
from shared.errors import InvalidRequest

UNREAD_BYTES_MAX = wire.WINDOW_BYTES + 64 * 1024
"""Input on its way to a command that has read nothing: the agent's window and a pipe."""
ORDERS_MAX = 32  # the agent keeps as many signals for a command that has not begun
SIZE_MAX = 65_535  # rows or columns
SPEC_BYTES_MAX = wire.FRAME_BYTES_MAX - 1024
STREAMS: Mapping[int, Stream] = {wire.STDOUT: "stdout", wire.STDERR: "stderr"}


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a command gets where its spec is silent."""

    env: Mapping[str, str]
    cwd: str
    user: str


def exec_payload(spec: ExecSpec, defaults: Defaults) -> bytes:
    """The fields of an EXEC frame. Raises ``InvalidRequest`` naming the field."""
    if (spec.argv is None) == (spec.shell is None) or spec.argv == []:
        raise InvalidRequest("exactly one of argv and shell is given", field="argv")
    parts = [
        wire.field(Tag.KEY, spec.op_id),
        _way(
            spec.user or defaults.user, spec.cwd or defaults.cwd,
            max(0, spec.output_limit_bytes), spec.merge, spec.stdin,
        ),
    ]  # fmt: skip
    if spec.timeout_s is not None:
        parts.append(wire.field(Tag.TIMEOUT_NS, max(1, int(spec.timeout_s * 1e9))))
    if spec.idle_timeout_s is not None:
        parts.append(wire.field(Tag.IDLE_NS, max(1, int(spec.idle_timeout_s * 1e9))))
    if spec.session is not None:
        parts.append(wire.field(Tag.SESSION, spec.session))
    if spec.pty is not None:
        parts += _terminal(spec, spec.pty)
    if spec.shell is not None:
        parts.append(wire.field(Tag.SHELL, spec.shell))
    parts += [wire.field(Tag.ARGV, a) for a in spec.argv or ()]
    for name, value in {**defaults.env, **spec.env}.items():
        if not name or "=" in name:
            raise InvalidRequest("a variable's name is empty or holds '='", field=f"env.{name}")
        parts.append(wire.field(Tag.ENV, f"{name}={value}"))
    payload = b"".join(parts)
    if len(payload) > SPEC_BYTES_MAX:
        raise InvalidRequest(
            f"command and environment are larger than {SPEC_BYTES_MAX} bytes",
            field="shell" if spec.shell is not None else "argv",
        )
    return payload


@lru_cache(maxsize=128)
def _way(user: str, cwd: str, limit: int, merge: bool, stdin: bool) -> bytes:
    """How to run it: nearly all commands of a node are run in a few ways."""
    return b"".join(
        (
            wire.field(Tag.USER, user), wire.field(Tag.CWD, cwd), wire.field(Tag.LIMIT, limit),
            wire.field(Tag.MERGE, int(merge)), wire.field(Tag.STDIN, int(stdin)),
        )
    )  # fmt: skip


def _terminal(spec: ExecSpec, size: Resize) -> list[bytes]:
    if spec.session is not None:
        raise InvalidRequest("a session has no terminal", field="pty")
    check_size(size)
    return [wire.field(Tag.ROWS, size.rows), wire.field(Tag.COLS, size.cols)]


def check_size(size: Resize) -> None:
    """Raises ``InvalidRequest`` for a size that no terminal has."""
    if not (0 < size.rows <= SIZE_MAX and 0 < size.cols <= SIZE_MAX):
        raise InvalidRequest(f"a terminal has 1 to {SIZE_MAX} rows and columns", field="pty")


def control_frame(order: str | Resize) -> tuple[int, bytes]:
    """The frame (type, payload) of a signal or a new size. Raises ``InvalidRequest``."""
    if isinstance(order, Resize):
        check_size(order)
        return Msg.RESIZE, struct.pack("<HH", order.rows, order.cols)
    return Msg.SIGNAL, bytes([signal_number(order)])


def outcome_of(result: Fields) -> ExecOutcome:
    """The port's outcome of a RESULT payload."""
    number = result.number(Tag.SIGNAL_NO)
    return ExecOutcome(
        exit_code=result.number(Tag.EXIT_CODE) if Tag.EXIT_CODE in result else None,
        signal=signal_name(number) if number else None,
        timed_out=bool(result.number(Tag.TIMED_OUT)),
        oom_killed=bool(result.number(Tag.OOM)),
        truncated=(result.number(Tag.DROPPED_OUT), result.number(Tag.DROPPED_ERR)),
        duration_s=result.number(Tag.DURATION_NS) / 1e9,
        session_fresh=bool(result.number(Tag.SESSION_FRESH)),
        session_ended=bool(result.number(Tag.SESSION_ENDED)),
    )


def signal_name(number: int) -> str:
    """``KILL`` for 9; real-time signals are ``RT<n>``."""
    try:
        return signal.Signals(number).name.removeprefix("SIG")
    except ValueError:
        return f"RT{number}"


def signal_number(name: str) -> int:
    """9 for ``KILL``, ``SIGKILL`` or ``9``; raises ``InvalidRequest``."""
    if name.isascii() and name.isdigit() and len(name) < 3 and int(name) < 65:
        return int(name)
    try:
        return signal.Signals["SIG" + name.removeprefix("SIG")]
    except KeyError:
        raise InvalidRequest(f"unknown signal {name!r}", field="signal") from None


def _control(io: ExecIO) -> Control:
    return lambda send: io.control_to(lambda order: send(*control_frame(order)))


def _id(op: Listed) -> int:
    return op.id


class _Given:
    """Input and orders of a command, the same ones each time that it is started."""

    def __init__(self, io: ExecIO) -> None:
        self._io = io
        self._input: list[bytes] = []
        self._size = 0
        self._orders: deque[tuple[int, bytes]] = deque(maxlen=ORDERS_MAX)

    def complete(self) -> bool:
        """Whether all of it can be given again."""
        return self._size <= UNREAD_BYTES_MAX

    async def input(self) -> AsyncIterator[bytes]:
        for chunk in tuple(self._input):
            yield chunk
        async for chunk in self._io.input():
            self._size += len(chunk)
            if self.complete():
                self._input.append(chunk)
            else:
                self._input.clear()
            yield chunk

    def control(self, send: Callable[[int, bytes], None]) -> None:
        def take(order: str | Resize) -> None:
            frame = control_frame(order)
            self._orders.append(frame)
            send(*frame)

        for frame in self._orders:
            send(*frame)
        self._io.control_to(take)


async def run_command(
    agent: AgentClient, spec: ExecSpec, io: ExecIO, *, defaults: Defaults
) -> ExecOutcome:
    """Runs one command to its end; cancelling kills its tree."""
    payload = exec_payload(spec, defaults)

    async def on_output(stream: int, data: bytes) -> None:
        await io.output(STREAMS[stream], data)

    given = _Given(io)

    def attempt() -> Awaitable[Fields]:
        return agent.run(
            Msg.EXEC, payload, on_output,
            stdin=given.input() if spec.stdin else None, control=given.control,
        )  # fmt: skip

    return outcome_of(await started(attempt, given.complete))


async def resume_command(
    agent: AgentClient, key: str, io: ResumeIO, *, stdin: bool = False
) -> ExecOutcome | None:
    """Follows the command ``key`` again after the edge restarted: its retained output
    from the start, then its outcome; ``None`` when the agent does not know it."""
    known = max((op for op in await agent.list() if op.key == key), key=_id, default=None)
    if known is None:
        return None

    async def on_output(stream: int, data: bytes) -> None:
        await io.output(STREAMS[stream], data)

    await io.resumes(taken=known.taken, terminal=known.terminal, base=known.base)
    result = await agent.attach(
        known.id, on_output,
        stdin=io.input() if stdin else None, control=_control(io),
    )  # fmt: skip
    return outcome_of(result)
