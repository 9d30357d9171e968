"""What looks like the platform's own folder inside a sandbox.

Owns: its files and its socket, and hearing who calls there. Does not own: laying it into
the sandbox (guest/attach), who opens the files (:mod:`.watching`). It is made in the
sandbox's folder on the node, so that each sandbox has its own, and goes with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "decoy"
SOCKET, LOG, ANSWER = "aether.sock", "chronus.log", "result.json"
BACKLOG = 16
CALLS_PER_TURN, TURN_S = 16, 0.5
_CREDENTIALS = struct.Struct("<iii")


def make(decoy: Path) -> None:
    """The files; the socket comes with :class:`Listener`. Blocking; again is fine."""
    decoy.mkdir(mode=0o755, exist_ok=True)
    for name, text in ((LOG, "started\n"), (ANSWER, "{}\n")):
        file = decoy / name
        file.write_text(text)
        file.chmod(0o444)
    decoy.chmod(0o755)


@dataclass(slots=True)
class Spare:
    """A decoy ahead of need, and its socket; none of either where it could not be made."""

    folder: Path
    sock: socket.socket | None

    def close(self) -> None:
        """Nobody calls it any more. Again is fine."""
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def make_spare(decoy: Path) -> Spare:
    """As :func:`make`, with its socket: where they cannot be made now, nothing is left."""
    try:
        make(decoy)
        return Spare(decoy, _socket(decoy))
    except OSError:
        shutil.rmtree(decoy, ignore_errors=True)
        return Spare(decoy, None)


def take(spare: Spare, folder: Path) -> tuple[Path, socket.socket | None]:
    """The decoy of the sandbox that ``folder`` is of, and its socket: ``spare``, where it is
    there. Blocking."""
    decoy = folder / FOLDER
    try:
        spare.folder.rename(decoy)
    except OSError:  # there is none: the disk was full, or the edge older; or on another disk
        make(decoy)
        spare.close()
    sock, spare.sock = spare.sock, None
    return decoy, sock


def _socket(decoy: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with contextlib.suppress(FileNotFoundError):
            (decoy / SOCKET).unlink()  # of an edge that is gone
        folder = os.open(decoy, os.O_PATH | os.O_CLOEXEC)
        try:  # a socket's address is short, a path need not be
            sock.bind(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
        (decoy / SOCKET).chmod(0o777)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


class Listener:
    """Takes calls, and hangs up. ``called`` is given the caller's process, as this machine
    counts, and its user; ``sock`` is the decoy's, where there is one."""

    def __init__(
        self, decoy: Path, called: Callable[[int, int], None], sock: socket.socket | None = None
    ) -> None:
        self._called, self._left = called, CALLS_PER_TURN
        self._sock = sock or _socket(decoy)
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        try:
            caller, _ = self._sock.accept()
        except OSError:
            return
        with caller:
            raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(raw)
        self._called(pid, uid)
        self._left -= 1
        if not self._left:  # who calls without end waits
            self._loop.remove_reader(self._sock)
            self._again = self._loop.call_later(TURN_S, self._go_on)

    def _go_on(self) -> None:
        self._left = CALLS_PER_TURN
        self._loop.add_reader(self._sock, self._accept)

    def close(self) -> None:
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
