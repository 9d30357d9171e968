"""What rules cost in the kernel and names at the edge, in a network namespace of its own.

Connects over TCP are made by one process, some from a control group with the programs to what
1 and 10,000 rules allow, so turned to the gate's address, and as many from a group without to
that address, in turns (``connects.c``). ``connect_us_off`` is the median without;
``connect_us_1`` and ``connect_us_10k`` are more by the median of the turns' differences.
Nobody listens at the gate's address then: the programs do all of their work, and no other
process is woken up, which takes longer and varies by more than what is looked for.
``accepted_us_*`` are the same with the gate accepting, ``connect_min_added_us_*`` the differences
of the shortest. ``hook_us_*`` is what the program runs for a connect by the kernel's own clock,
reading which is some of it. ``dns_ms`` is what the name server adds to a question.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import ipaddress
import os
import secrets
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dns.message
import dns.rdatatype
import dns.rrset

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.egress.dns import Lookup, NameServer
from services.edge.egress.kernelmaps import GATE4, GATE_PORT, Kernel, PolicyMap
from services.edge.egress.namespaces import Inside, Uplink, open_inside
from services.edge.egress.resolver import Resolver
from services.edge.policy.reach import Reach
from shared import policies

EACH = 200
"""Connects in a turn."""
TURNS, QUICK_TURNS = 200, 40
RULES = 10_000
TARGET = "80.19.136.7"
"""Among the rules, so that the look-up is as deep as any."""
SWAPS = 200
HOOK = "out_connect4"
LOOKUPS, QUICK_LOOKUPS = 500, 150


@contextmanager
def namespace() -> Iterator[int]:
    """The process of an empty network namespace with its loopback up."""
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "ip link set lo up; echo up; exec sleep 600"],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline()
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


@contextmanager
def group() -> Iterator[Path]:
    """A control group of its own."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    root = Path(next(m[1] for m in mounts if m[2] == "cgroup2"))
    made = root / f"dsec-bench-{secrets.token_hex(3)}"
    made.mkdir()
    try:
        yield made
    finally:
        made.rmdir()


@dataclass(frozen=True, slots=True)
class _Beside:
    """Microseconds of a connect: medians without and with the programs, of differences, and
    the difference of the shortest."""

    off: float
    on: float
    added: float
    min_added: float


@dataclass(frozen=True, slots=True)
class _Field:
    binary: Path
    pid: int
    off: Path
    on: Path
    turns: int

    def connects(self) -> _Beside:
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net", str(self.binary)]
        off, on = (str(self.off), GATE4, str(GATE_PORT)), (str(self.on), TARGET, "443")
        done = subprocess.run(
            [*enter, str(self.turns), str(EACH), *off, *on],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        plain, judged, added, *least = (int(ns) / 1e3 for ns in done.stdout.split())
        return _Beside(plain, judged, added, least[1] - least[0])


@contextmanager
def _accepting(inside: Inside) -> Iterator[None]:
    """What comes to the gate is accepted and closed."""
    stop, listener = threading.Event(), inside.tcp[0]
    listener.settimeout(0.2)

    def accept() -> None:
        while not stop.is_set():
            with contextlib.suppress(OSError):
                listener.accept()[0].close()

    taker = threading.Thread(target=accept)
    taker.start()
    try:
        yield
    finally:
        stop.set()
        taker.join()


def _rules(count: int) -> Reach:
    blocks = (ipaddress.IPv4Address(0x50000000 + 256 * n) for n in range(count - 1))  # 80.0.0.0
    named = {f"{block}/32:443": True for block in blocks}
    # beyond what one document may hold: the kernel's map is measured, not the reader
    rules = [r for text in named for r in policies.read(None, {text: True}).network]
    rules += policies.read(None, {f"{TARGET}:443": True}).network
    return Reach(rules, {})


@contextmanager
def _counted() -> Iterator[None]:
    """The kernel keeps the time of its programs; that costs them some of it."""
    library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    fd = library.bpf_enable_stats(0)
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd), "statistics of programs")
    try:
        yield
    finally:
        os.close(fd)


def _ran(kernel: Kernel) -> tuple[int, int]:
    """Nanoseconds and times that the program has run while it was counted."""
    library = kernel._programs._lib
    one = library.bpf_object__find_program_by_name(kernel._programs._object, HOOK.encode())
    library.bpf_program__fd.argtypes = [ctypes.c_void_p]
    told = Path(f"/proc/self/fdinfo/{library.bpf_program__fd(one)}").read_text()
    found = dict(line.split(":\t") for line in told.splitlines())
    return int(found["run_time_ns"]), int(found["run_cnt"])


def connects(*, quick: bool) -> dict[str, Any]:
    """Blocking."""
    binary = Path(tempfile.mkdtemp(prefix="dsec-bench-"), "connects")
    source = Path(__file__).with_name("connects.c")
    subprocess.run(["cc", "-O2", "-o", binary, source], check=True)
    figures: dict[str, Any] = {}
    with namespace() as pid, group() as off, group() as on:
        inside = open_inside(pid, "")
        kernel = Kernel(GUEST_BUILD / "bpf" / "egress.o")
        kernel.watch(on)
        kernel.register(inside.cookie)
        numbers: dict[str, int] = {}
        maps = {"1": kernel.policy(numbers), "10k": kernel.policy(numbers)}
        maps["1"].put(_rules(1).entries)
        maps["10k"].put(_rules(RULES).entries)
        field = _Field(binary, pid, off, on, QUICK_TURNS if quick else TURNS)
        try:
            with _accepting(inside):
                accepted = _each(kernel, inside.cookie, maps, field)
            inside.tcp[0].close()
            refused = _each(kernel, inside.cookie, maps, field)
            figures["swap_ms"] = _swaps(kernel, inside.cookie, list(maps.values()))
            with _counted():
                for name, rules in maps.items():
                    kernel.enforce(inside.cookie, rules)
                    ran, times = _ran(kernel)
                    field.connects()
                    more, again = _ran(kernel)
                    figures[f"hook_us_{name}"] = round((more - ran) / (again - times) / 1e3, 3)
        finally:
            inside.close()
            kernel.close()
    for what, found in (("connect", refused), ("accepted", accepted)):
        off_us = statistics.median(one.off for one in found.values())
        figures[f"{what}_us_off"] = round(off_us, 3)
        for name, one in found.items():
            figures[f"{what}_us_{name}"] = round(off_us + one.added, 3)
    for name, one in refused.items():
        figures[f"connect_min_added_us_{name}"] = round(one.min_added, 3)
    return figures


def _each(
    kernel: Kernel, netns: int, maps: Mapping[str, PolicyMap], field: _Field
) -> dict[str, _Beside]:
    found = {}
    for name, one in maps.items():
        kernel.enforce(netns, one)
        found[name] = field.connects()
    return found


def _swaps(kernel: Kernel, netns: int, maps: Sequence[PolicyMap]) -> float:
    """Median milliseconds of putting other rules into force."""
    took = []
    for number in range(SWAPS):
        start = time.perf_counter()
        kernel.enforce(netns, maps[number % 2])
        took.append(time.perf_counter() - start)
    return round(statistics.median(took) * 1e3, 3)


class _Upstream(asyncio.DatagramProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        reply = dns.message.make_response(query)
        name = query.question[0].name
        reply.answer.append(dns.rrset.from_text(name, 60, "IN", "A", TARGET))
        self._transport.sendto(reply.to_wire(), addr)


async def names(*, quick: bool) -> dict[str, Any]:
    """A question asked of the sandbox's name server, and straight of the one behind."""
    count = QUICK_LOOKUPS if quick else LOOKUPS
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(_Upstream, local_addr=("127.0.0.1", 0))
    upstream = transport.get_extra_info("sockname")
    resolver = Resolver(Uplink(None), [upstream])

    async def look(name: str, kind: int) -> Lookup:
        return Lookup(await resolver.ask(name, kind))

    udp, tcp = socket.socket(type=socket.SOCK_DGRAM), socket.socket()
    for sock in (udp, tcp):
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
    tcp.listen()
    server = NameServer(udp, tcp, look)
    server.open()
    direct: list[float] = []
    proxied: list[float] = []
    try:
        for _ in range(count):
            direct.append(await asyncio.to_thread(_ask, upstream))
            proxied.append(await asyncio.to_thread(_ask, udp.getsockname()))
    finally:
        server.close()
        udp.close()
        tcp.close()
        transport.close()
    added = statistics.median(proxied) - statistics.median(direct)
    return {
        "dns_ms": round(added * 1e3, 3),
        "dns_direct_ms": round(statistics.median(direct) * 1e3, 3),
        "dns_proxied_ms": round(statistics.median(proxied) * 1e3, 3),
    }


def _ask(server: tuple[str, int]) -> float:
    query = dns.message.make_query("host.example", dns.rdatatype.A).to_wire()
    with socket.socket(type=socket.SOCK_DGRAM) as sock:
        sock.settimeout(5)
        start = time.perf_counter()
        sock.sendto(query, server)
        sock.recv(4096)
        return time.perf_counter() - start
