"""Denied system calls, as their filters' listeners tell them.

Owns: the socket over which listeners come, answering each call that is asked. Does not
own: which calls are denied (:mod:`services.edge.policy.seccomp`), what becomes of the
news. The caller stands still until it is answered: so each is counted, and one that asks
too often waits for its turn, which is what bounds a flood.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NOTIF = struct.Struct("<QIIiIQ6Q")
ANSWER = struct.Struct("<QqiI")
RECEIVE = (3 << 30) | (NOTIF.size << 16) | (ord("!") << 8)
SEND = (3 << 30) | (ANSWER.size << 16) | (ord("!") << 8) | 1
CALLS_PER_TURN = 64
TURN_S = 0.1
"""A sandbox that asked so often in one turn waits for the next."""
LISTENERS_MAX = 512
"""Of one sandbox, under all the policies that it has had."""


@dataclass(frozen=True, slots=True)
class Denied:
    """One call: its number and arguments; the process as this machine names it."""

    number: int
    args: tuple[int, ...]
    pid: int
    uid: int
    comm: str


@dataclass(slots=True)
class Room:
    """For how many more listeners there is room in one sandbox."""

    left: int = LISTENERS_MAX


class Asking:
    """The listeners of one policy of a sandbox. ``theirs`` goes to its agent and is then
    closed."""

    def __init__(self, told: Callable[[Denied], None], room: Room) -> None:
        self._told, self._room = told, room
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._listeners: set[int] = set()
        self._left = CALLS_PER_TURN
        self._waiting: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours.fileno(), self._arrived)

    def _arrived(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._ours, 64, 4, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return
        if not data:
            self._loop.remove_reader(self._ours.fileno())
        for fd in fds:
            if self._room.left <= 0:
                os.close(fd)  # what it would ask fails, untold
                continue
            self._room.left -= 1
            self._listeners.add(fd)
            self._loop.add_reader(fd, self._asked, fd)

    def _asked(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while self._left:
            ready = poll.poll(0)
            if not ready:
                return
            if not ready[0][1] & select.POLLIN:
                self._drop(fd)  # nobody is left who could ask
                return
            if not self._answer(fd):
                self._drop(fd)
                return
            if self._left == CALLS_PER_TURN:
                self._loop.call_later(TURN_S, self._turn)
            self._left -= 1
        self._loop.remove_reader(fd)
        self._waiting.append(fd)

    def _turn(self) -> None:
        self._left = CALLS_PER_TURN
        waiting, self._waiting = self._waiting, []
        for fd in waiting:
            if fd in self._listeners:
                self._loop.add_reader(fd, self._asked, fd)

    def _answer(self, fd: int) -> bool:
        room = bytearray(NOTIF.size)
        try:
            fcntl.ioctl(fd, RECEIVE, room)
            number, pid, _, call, _, _, *args = NOTIF.unpack(room)
            denied = Denied(call, tuple(args), pid, *_who(pid))
            fcntl.ioctl(fd, SEND, bytearray(ANSWER.pack(number, 0, -errno.EPERM, 0)))
        except OSError as err:
            return err.errno in (errno.ENOENT, errno.EINTR)  # the caller died meanwhile
        self._told(denied)
        return True

    def _drop(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._listeners.discard(fd)
        self._room.left += 1
        os.close(fd)

    def retire(self) -> None:
        """A newer policy is in force: commands that run go on asking, no new ones come."""
        self._loop.remove_reader(self._ours.fileno())
        self._ours.close()

    def close(self) -> None:
        """Calls that would be asked fail from now on."""
        if self._ours.fileno() >= 0:
            self.retire()
        self.theirs.close()
        for fd in list(self._listeners):
            self._drop(fd)


def _who(pid: int) -> tuple[int, str]:
    folder = Path(f"/proc/{pid}")
    with contextlib.suppress(OSError):
        return folder.stat().st_uid, (folder / "comm").read_text(errors="replace").strip()
    return -1, ""
