"""Seeds for fuzzing the agent: golden conversations, made from the edge's own encoder.

Owns: the steps of an input (the format is in ``guest/fuzz/channel.c``) and what good
conversations look like. Does not own: running them. ``python -m tests.fuzz.seeds FOLDER``
writes them, a file each.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path

from services.edge.agent import wire
from services.edge.agent.commands import Defaults, control_frame, exec_payload
from services.edge.agent.wire import FileOp, Msg, Tag, field, frame
from services.edge.drivers.base import ExecSpec, Resize

DEFAULTS = Defaults({"A": "b"}, "/", "root")
HELLO = frame(Msg.HELLO, 0, wire.MAGIC + field(Tag.VERSION, wire.VERSION))
REGRESSIONS = Path(__file__).parent / "regressions"


class Step(IntEnum):
    SAY = 0
    SAY_WITH_FDS = 3
    WRITE = 4
    END = 5
    LAUNCHED = 6
    RECONNECT = 7
    TIME = 8
    READING = 9


OUT, ERR, STATUS = 0, 1, 2
MANY, TAKES_INPUT, CLOSES = 4, 8, 16


def step(kind: Step, data: bytes = b"") -> bytes:
    """One step of an input; data of more than 64 KiB become several."""
    pieces = [data[i : i + 0xFFFF] for i in range(0, len(data), 0xFFFF)] or [b""]
    return b"".join(struct.pack("<BH", kind, len(p)) + p for p in pieces)


def say(*frames: bytes) -> bytes:
    return step(Step.SAY, b"".join(frames))


def setup(v1: int = 0, v2: int = 0, oom: int = 0, listener: int = 0) -> bytes:
    numbers = {Tag.V1_COUNT: v1, Tag.HAS_V2: v2, Tag.HAS_OOM: oom, Tag.HAS_LISTENER: listener}
    body = frame(Msg.SETUP, 0, b"".join(field(t, n) for t, n in numbers.items()))
    count = v1 + v2 + oom + listener
    if not count:
        return say(body)
    padding = frame(Msg.SETUP, 0)[:-1] + bytes([count])  # the step's last byte is the count
    return step(Step.SAY_WITH_FDS, body + padding)


def command(op_id: int, **facts: object) -> bytes:
    given = {"shell": "true", **facts}
    spec = ExecSpec(f"key{op_id}", **given)  # type: ignore[arg-type]
    return frame(Msg.EXEC, op_id, exec_payload(spec, DEFAULTS))


def file(op_id: int, op: FileOp, *more: bytes) -> bytes:
    fields = [field(Tag.FOP, op), field(Tag.PATH, "/tmp/x"), field(Tag.USER, "root"), *more]
    return frame(Msg.FILE, op_id, b"".join(fields))


def data(op_id: int, content: bytes) -> bytes:
    return frame(Msg.DATA, op_id, bytes([wire.STDIN]) + content)


def credit(op_id: int, stream: int, size: int) -> bytes:
    return frame(Msg.CREDIT, op_id, bytes([stream]) + struct.pack("<I", size))


def wrote(child: int, how: int, content: bytes = b"out\n") -> bytes:
    return step(Step.WRITE, bytes([child, how]) + content)


def ended(child: int, status: int = 0) -> bytes:
    return step(Step.END, bytes([child, status]))


def launched(child: int, how: int = 1) -> bytes:
    return step(Step.LAUNCHED, bytes([child, how]))


def passes(bits: int) -> bytes:
    return step(Step.TIME, bytes([bits]))


BEGUN = say(HELLO) + setup()
ERROR = field(Tag.CODE, "invalid_request") + field(Tag.MESSAGE, "no") + field(Tag.FIELD, "cwd")


def conversations() -> dict[str, bytes]:
    """Good conversations by name."""
    one = BEGUN + say(command(1)) + launched(0)
    return {
        "greeting": BEGUN + say(frame(Msg.LIST, 1)),
        "version": say(frame(Msg.HELLO, 0, wire.MAGIC + field(Tag.VERSION, 9))),
        "descriptors": say(HELLO) + setup(v1=2, v2=1, oom=1) + setup(v1=3) + say(command(1)),
        "listener": say(HELLO) + setup(listener=1),
        "command": one + wrote(0, OUT) + wrote(0, ERR) + ended(0, 6) + passes(25)
        + say(frame(Msg.ACK, 1)),
        "failed": one + wrote(0, STATUS, ERROR) + ended(0) + passes(25),
        "not launched": BEGUN + say(command(1), command(2)) + launched(0, 0) + launched(1, 8),
        "input": BEGUN + say(command(1, stdin=True), data(1, b"typed" * 50)) + launched(0)
        + wrote(0, OUT | TAKES_INPUT) + say(data(1, b"x"), frame(Msg.EOF, 1)) + ended(0),
        "too much input": BEGUN + say(command(1, stdin=True), *[data(1, bytes(60_000))] * 6),
        "output": BEGUN + say(command(1, output_limit_bytes=4096)) + launched(0)
        + wrote(0, OUT | MANY, bytes(3000)) + wrote(0, ERR | MANY, b"e" * 3000) + ended(0)
        + passes(31) + say(credit(1, 1, 10_000), credit(1, 2, 10_000)),
        "without a budget": BEGUN + say(command(1, output_limit_bytes=1 << 40)) + launched(0)
        + wrote(0, OUT | MANY, bytes(60_000)) * 3 + say(credit(1, 1, 1 << 24), frame(Msg.LIST, 9))
        + wrote(0, OUT | MANY, bytes(9000)) + ended(0) + step(Step.RECONNECT) + say(HELLO)
        + say(frame(Msg.LIST, 9), frame(Msg.ATTACH, 1)),
        "merged": BEGUN + say(command(1, merge=True)) + launched(0) + wrote(0, OUT | CLOSES)
        + wrote(0, ERR | CLOSES) + ended(0),
        "limit": BEGUN + say(command(1, timeout_s=0.5)) + launched(0) + passes(30) + ended(0, 19)
        + passes(33),
        "killed": one + say(frame(Msg.SIGNAL, 1, b"\x0f"), frame(Msg.KILL, 1)) + ended(0, 19)
        + passes(33),
        "signals before the start": BEGUN + say(command(1), frame(Msg.SIGNAL, 1, b"\x02"))
        + launched(0) + wrote(0, STATUS | CLOSES, b"") + say(frame(Msg.SIGNAL, 1, b"\0")),
        "session": BEGUN + say(command(1, session="s"), command(2, session="s"))
        + launched(0) + wrote(0, OUT) + say(command(3, session="t", merge=True)) + ended(0, 4)
        + passes(25) + launched(0) + ended(0) + say(frame(Msg.KILL, 3)),
        "terminal": BEGUN + say(command(1, pty=Resize(24, 80), stdin=True)) + launched(0)
        + say(frame(control_frame(Resize(30, 90))[0], 1, control_frame(Resize(30, 90))[1]))
        + wrote(0, OUT) + say(data(1, b"ls\n"), frame(Msg.EOF, 1)) + ended(0) + passes(31),
        "hung up": BEGUN + say(command(1, pty=Resize(1, 1))) + launched(0)
        + step(Step.RECONNECT) + passes(37) + passes(36) + ended(0, 19),
        "reading": BEGUN + say(file(1, FileOp.READ)) + launched(0)
        + wrote(0, OUT | MANY, bytes(900)) + say(credit(1, 1, 1 << 20))
        + wrote(0, STATUS, field(Tag.NAME, "x")) + ended(0),
        "writing": BEGUN + say(file(1, FileOp.WRITE, field(Tag.MODE, 0o600)), data(1, b"c" * 900))
        + launched(0) + say(frame(Msg.EOF, 1)) + wrote(0, STATUS | TAKES_INPUT, ERROR) + ended(0),
        "other files": BEGUN + say(*[file(n, op, field(Tag.DST, "/y"), field(Tag.RECURSIVE, 1))
                                     for n, op in enumerate(FileOp, 1)]) + ended(0),
        "reconnected": one + wrote(0, OUT) + step(Step.RECONNECT) + say(HELLO, frame(Msg.LIST, 9))
        + say(frame(Msg.ATTACH, 1), frame(Msg.ATTACH, 7)) + ended(0) + passes(25)
        + step(Step.RECONNECT) + say(HELLO, frame(Msg.ATTACH, 1)),
        "not reading": step(Step.READING) + BEGUN + say(*[frame(Msg.LIST, n) for n in range(300)])
        + step(Step.READING),
        "same id": BEGUN + say(command(1), command(1)) + launched(0),
        "many": BEGUN + say(*[command(n) for n in range(1, 80)]) + b"".join(map(ended, range(9))),
    }  # fmt: skip


def write(folder: Path) -> Iterable[Path]:
    """Writes the conversations and what once went wrong; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in conversations().items():
        target = folder / name.replace(" ", "-")
        target.write_bytes(content)
    for found in sorted(REGRESSIONS.glob("*")):
        (folder / found.name).write_bytes(found.read_bytes())
    return sorted(folder.iterdir())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
