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


def make_spare(decoy: Path) -> None:
    """As :func:`make`, ahead of need: where it cannot be made now, nothing of it is left."""
    try:
        make(decoy)
    except OSError:
        shutil.rmtree(decoy, ignore_errors=True)


def take(spare: Path, folder: Path) -> Path:
    """The decoy of the sandbox that ``folder`` is of: ``spare``, where it is there."""
    decoy = folder / FOLDER
    try:
        spare.rename(decoy)
    except OSError:  # there is none: the disk was full, or the edge older; or on another disk
        make(decoy)
    return decoy


class Listener:
    """Takes calls, and hangs up. ``called`` is given the caller's process, as this machine
    counts, and its user."""

    def __init__(self, decoy: Path, called: Callable[[int, int], None]) -> None:
        self._called, self._left = called, CALLS_PER_TURN
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        with contextlib.suppress(FileNotFoundError):
            (decoy / SOCKET).unlink()  # of an edge that is gone
        folder = os.open(decoy, os.O_PATH | os.O_CLOEXEC)
        try:  # a socket's address is short, a path need not be
            self._sock.bind(f"/proc/self/fd/{folder}/{SOCKET}")
        finally:
            os.close(folder)
        (decoy / SOCKET).chmod(0o777)
        self._sock.listen(BACKLOG)
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
