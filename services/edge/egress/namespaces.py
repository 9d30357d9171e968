"""Sockets in other network namespaces.

Owns: entering one for a moment in a thread of its own (a namespace belongs to a thread,
and a thread of a pool would carry it on), the gate's addresses on a sandbox's loopback.
Does not own: what is said over the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from services.edge.egress.kernelmaps import GATE4, GATE6, GATE_PORT
from shared.errors import Conflict, Unavailable

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
SO_NETNS_COOKIE = 71
IPV6_FREEBIND = 78
SIOCSIFADDR, SIOCSIFNETMASK = 0x8916, 0x891C
LOOPBACK_INDEX = 1
BACKLOG = 128
MARKS = Path("/proc/sys/net/ipv4/tcp_fwmark_accept")
"""Of the namespace that looks: a connection that is accepted has the mark of the one that
was made, by which the kernel's programs name it."""
DNS_PORT = 53
_libc = ctypes.CDLL(None, use_errno=True)


def _descriptor(namespace: Path | int) -> int:
    if isinstance(namespace, int):
        return os.dup(namespace)
    return os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)


def within(namespace: Path | int, work: Callable[[], T]) -> T:
    """The result of ``work`` done in a network namespace, by its file or a descriptor of
    a process in it. Blocking. Raises what it raises, and ``Unavailable`` where the
    namespace cannot be entered."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            fd = _descriptor(namespace)
            try:
                if _libc.setns(fd, CLONE_NEWNET):
                    err = ctypes.get_errno()
                    raise OSError(err, os.strerror(err))
            finally:
                os.close(fd)
            done.append(work())
        except BaseException as exc:
            failed.append(exc)

    thread = threading.Thread(target=run, name="netns")
    thread.start()
    thread.join()
    if failed:
        if isinstance(failed[0], OSError):
            raise Unavailable(f"network namespace {namespace}: {failed[0]}") from failed[0]
        raise failed[0]
    return done[0]


@dataclass(slots=True)
class Inside:
    """The gate's sockets in a sandbox; ``cookie`` names its namespace in the kernel."""

    cookie: int
    tcp: list[socket.socket]
    dns_udp: socket.socket
    dns_tcp: socket.socket

    def close(self) -> None:
        for sock in (*self.tcp, self.dns_udp, self.dns_tcp):
            with contextlib.suppress(OSError):
                sock.close()


def open_inside(pid: int, container: str) -> Inside:
    """Makes the gate's sockets in the namespace of a process of a container. Blocking.
    Raises ``Conflict`` where a process in there has their addresses, and ``Unavailable``
    where the number is another process's by now."""
    try:
        process = os.pidfd_open(pid)
    except OSError as err:
        raise Unavailable(f"process {pid}: {err}") from err
    try:
        # read after it was opened: what is read is of this process or of none
        if container not in Path(f"/proc/{pid}/cgroup").read_text():
            raise Unavailable("the sandbox's process is not the sandbox's", cause="runtime")
        return within(process, _open)
    except OSError as err:
        raise Unavailable(f"process {pid}: {err}") from err
    finally:
        os.close(process)


def _open() -> Inside:
    made: list[socket.socket] = []

    def sock(family: int, kind: int, address: tuple[Any, ...]) -> socket.socket:
        one = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        made.append(one)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # the kernel readies a new address a moment later
            one.setsockopt(socket.IPPROTO_IPV6, IPV6_FREEBIND, 1)
        if kind == socket.SOCK_STREAM:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(address)
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                raise
            text = f"a process of the sandbox has port {address[1]} of the gate"
            raise Conflict(text, field="network_rules") from err
        if kind == socket.SOCK_STREAM:
            one.listen(BACKLOG)
        return one

    try:
        six = _addresses()
        MARKS.write_text("1")
        tcp = [sock(socket.AF_INET, socket.SOCK_STREAM, (GATE4, GATE_PORT))]
        if six:
            tcp.append(sock(socket.AF_INET6, socket.SOCK_STREAM, (GATE6, GATE_PORT)))
        dns_udp = sock(socket.AF_INET, socket.SOCK_DGRAM, (GATE4, DNS_PORT))
        dns_tcp = sock(socket.AF_INET, socket.SOCK_STREAM, (GATE4, DNS_PORT))
        cookie = dns_udp.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        return Inside(int.from_bytes(cookie, "little"), tcp, dns_udp, dns_tcp)
    except BaseException:
        for one in made:
            one.close()
        raise


def _addresses() -> bool:
    """Puts the gate's addresses on the loopback interface; whether there is IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
        for request, text in ((SIOCSIFADDR, GATE4), (SIOCSIFNETMASK, "255.255.255.255")):
            address = struct.pack("<HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(control, request, b"lo:1".ljust(16, b"\0") + address.ljust(24, b"\0"))
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
            wanted = socket.inet_pton(socket.AF_INET6, GATE6)
            with contextlib.suppress(FileExistsError):
                fcntl.ioctl(control, SIOCSIFADDR, wanted + struct.pack("<Ii", 128, LOOPBACK_INDEX))
            return True
    except OSError:  # a kernel or an engine without IPv6: nothing can be reached by it
        return False


class Uplink:
    """Where the gate connects from: a named namespace, or the edge's own."""

    def __init__(self, namespace: Path | None) -> None:
        self._namespace = namespace

    async def socket(self, family: int, kind: int) -> socket.socket:
        """A non-blocking socket out there."""

        def make() -> socket.socket:
            return socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

        if self._namespace is None:
            return make()
        namespace = self._namespace
        return await asyncio.to_thread(lambda: within(namespace, make))

    async def is_own(self, address: str, family: int) -> bool:
        """Whether the address is one of the node itself, of any interface: a datagram
        socket that is connected to it would send from it. Nothing is sent."""
        with await self.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
                return bool(probe.getsockname()[0] == address)
            except OSError:
                return False
