"""A short helper program that waits until it is needed.

Owns: starting it, telling it what to do, what it says, how it ended, its longest time. Does
not own: what it does. To begin a program takes longer than what it does, so it is begun ahead
and waits. A thread waits for it, so nothing of :mod:`subprocess` is here: that closes every
descriptor a process could have, while all other threads stand, and looks for the end of one
that has a time limit once in a millisecond. All descriptors of this process close when
another program is executed, but those that are given.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

SAID_MAX = 1024
READY = b"\0"
"""What it says first."""


@dataclass(frozen=True, slots=True)
class Ended:
    """``code`` is its exit status, negative that of a signal; ``said`` is how its errors
    begin."""

    code: int
    said: str


class Helper:
    """A program that runs and waits. It reads what it is to do from its input, errors and
    output come back by the same socket. It ends when this process does. Blocking."""

    def __init__(
        self, program: Path, arguments: Sequence[str], fds: Sequence[int], *, within_s: float
    ) -> None:
        """Starts it with ``fds``, by their numbers, and no environment. Raises
        ``TimeoutError`` where it is not ready in time, and ``OSError``."""
        self._sock, theirs = socket.socketpair()
        self._sock.settimeout(within_s)
        self._pid: int | None = None
        try:
            with theirs:
                self._pid = _spawn(program, arguments, fds, theirs.fileno())
            self._wait(until := time.monotonic() + within_s, within_s)
            if (first := self._sock.recv(len(READY))) != READY:
                said = self._words(until, within_s, first)
                raise OSError(said.decode(errors="replace").strip() or "it ended at once")
        except BaseException:
            self.close()
            raise

    def run(
        self, words: Sequence[str], fds: Sequence[int], *, within_s: float,
        goes: Callable[[], object] = lambda: None,
    ) -> Ended:  # fmt: skip
        """Has it do what ``words`` say, with copies of ``fds``, until it has ended; ``goes`` is
        called when it is told. Raises ``TimeoutError`` when it took longer, and then it was
        killed, and ``OSError``."""
        until = time.monotonic() + within_s
        try:
            self._tell(b"".join(os.fsencode(word) + b"\0" for word in words), fds)
            goes()
            said = self._words(until, within_s)
            pid, self._pid = self._pid, None
            if pid is None:
                raise ProcessLookupError("the helper has ended")
            _, status = os.waitpid(pid, 0)  # who has no open end any more is about to end
        finally:
            self.close()
        return Ended(os.waitstatus_to_exitcode(status), said.decode(errors="replace").strip())

    def _tell(self, words: bytes, fds: Sequence[int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # it says why, or its end does
            sent = socket.send_fds(self._sock, [words], fds)
            self._sock.sendall(words[sent:])
            self._sock.shutdown(socket.SHUT_WR)

    def _words(self, until: float, within_s: float, said: bytes = b"") -> bytes:
        """All that it says until its end."""
        while True:
            self._wait(until, within_s)
            try:
                piece = self._sock.recv(SAID_MAX)
            except ConnectionResetError:  # it ended with something unread
                piece = b""
            if not piece:
                return said
            said = (said + piece)[:SAID_MAX]

    def _wait(self, until: float, within_s: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        left_s = until - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError(f"it took more than {within_s} s")

    def close(self) -> None:
        """Ends it. Again is fine."""
        self._sock.close()
        pid, self._pid = self._pid, None
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _spawn(program: Path, arguments: Sequence[str], fds: Sequence[int], sock: int) -> int:
    actions = [
        *((os.POSIX_SPAWN_DUP2, sock, fd) for fd in (0, 1, 2)),
        *((os.POSIX_SPAWN_DUP2, fd, fd) for fd in fds),  # of itself: it stays open
    ]
    return os.posix_spawn(
        program, [str(program), *arguments], {}, file_actions=actions,
        setsigdef=[signal.SIGPIPE], setsigmask=[],
    )  # fmt: skip
