"""This terminal and one in a sandbox, connected.

Owns: raw mode and its end on every way out, the size, the signals that end us. Does not
own: the streams (:mod:`libdsec.cli.pump`). Keys go through as they are, Ctrl-C and
Ctrl-Z too: the terminal inside makes signals of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from libdsec import DSecError, Process, Sandbox
from libdsec.cli.common import exit_code
from libdsec.cli.pump import pump

SHELL = "command -v bash >/dev/null 2>&1 && exec bash; exec sh"
"""bash where the image has it. On a terminal both are interactive, with job control."""
STDIN = 0
ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
DEFAULT_SIZE = (24, 80)
SIGNALLED = 128


def on_terminal() -> bool:
    """Whether our input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def size() -> tuple[int, int]:
    """Rows and columns of our terminal; of a usual one where it does not know."""
    try:
        found = os.get_terminal_size(STDIN)
    except OSError:
        return DEFAULT_SIZE
    return found.lines or DEFAULT_SIZE[0], found.columns or DEFAULT_SIZE[1]


@contextmanager
def raw(fd: int) -> Iterator[Callable[[], None]]:
    """Raw mode inside, the mode of before afterwards. Gives what enters it again."""
    before = termios.tcgetattr(fd)

    def enter() -> None:
        tty.setraw(fd, termios.TCSADRAIN)

    try:
        enter()
        yield enter
    finally:
        with suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(fd, termios.TCSADRAIN, before)


async def interact(sandbox: Sandbox, *, user: str | None = None) -> int:
    """A shell of the sandbox on our terminal, to its end or ours; the exit code."""
    process = await sandbox.spawn(SHELL, user=user, pty=size())
    ended: list[int] = []
    try:
        with raw(STDIN) as enter, _signals(process, enter, ended):
            return exit_code(await pump(process, stdin=True))
    except asyncio.CancelledError:
        if not ended:
            raise
        return SIGNALLED + ended[0]


@contextmanager
def _signals(process: Process, enter: Callable[[], None], ended: list[int]) -> Iterator[None]:
    """A new size is passed on; what would end us is noted in ``ended`` and cancels the
    task, so that the terminal is put back and the shell inside is killed; after a stop
    raw mode is entered again."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    told: set[asyncio.Task[None]] = set()

    def resized() -> None:
        work = loop.create_task(_tell(process))
        told.add(work)
        work.add_done_callback(told.discard)

    def continued() -> None:
        enter()
        resized()

    handlers: dict[int, Callable[[], object]] = {
        signal.SIGWINCH: resized, signal.SIGCONT: continued,
    }  # fmt: skip

    def end(number: int) -> None:
        ended.append(number)
        if task is not None:
            task.cancel()

    handlers |= {number: partial(end, number) for number in ENDING}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    resized()  # it may have changed before we listened
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def _tell(process: Process) -> None:
    with suppress(DSecError):  # a size that is not told does no harm
        await process.resize(*size())
