"""What rules cost in the kernel and names at the edge, in a network namespace of its own.

``connect_us_*`` are medians of TCP connects from inside to the gate's socket: without
programs, and turned there by 1 and 10,000 rules, in turns. ``hook_us_*`` is what of it the
kernel's programs run for a connect, by the kernel's own clock: judging it, noting where it
was to go, and its port. ``dns_ms`` is what the name server adds to a question.
"""

from __future__ import annotations

import asyncio
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dns.message
import dns.rdatatype
import dns.rrset

from services.edge.drivers.container.settings import GUEST_BUILD
from services.edge.egress.dns import Lookup, NameServer
from services.edge.egress.kernelmaps import GATE4, GATE_PORT, Kernel
from services.edge.egress.namespaces import Inside, Uplink, open_inside
from services.edge.egress.resolver import Resolver
from services.edge.policy.reach import Reach
from shared import policies

CONNECTS, QUICK_CONNECTS = 20_000, 4_000
TURNS, QUICK_TURNS = 7, 3
RULES = 10_000
TARGET = "198.51.100.1"
SWAPS = 50
HOOKS = ("out_connect4", "note_port")
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


def _connects(binary: Path, pid: int, inside: Path, target: tuple[str, int], count: int) -> float:
    """Median microseconds of a connect in the namespace and the group."""
    text = f'echo $$ >{inside}/cgroup.procs; exec "$0" "$@"'
    argv = ["nsenter", f"--net=/proc/{pid}/ns/net", "sh", "-c", text, str(binary)]
    done = subprocess.run(
        [*argv, target[0], str(target[1]), str(count)], capture_output=True, text=True, check=True
    )
    return int(done.stdout) / 1e3


def _accept(inside: Inside, stop: threading.Event) -> None:
    listener = inside.tcp[0][1]
    listener.settimeout(0.2)
    while not stop.is_set():
        try:
            listener.accept()[0].close()
        except OSError:
            continue


def _rules(count: int) -> Reach:
    blocks = (ipaddress.IPv4Address(0x50000000 + 256 * n) for n in range(count - 1))
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


def _run_ns(kernel: Kernel, names: Sequence[str] = HOOKS) -> int:
    """Nanoseconds that programs have run while they were counted."""
    library, found = kernel._programs._lib, 0
    for name in names:
        one = library.bpf_object__find_program_by_name(kernel._programs._object, name.encode())
        library.bpf_program__fd.argtypes = [ctypes.c_void_p]
        told = Path(f"/proc/self/fdinfo/{library.bpf_program__fd(one)}").read_text()
        found += int(dict(line.split(":\t") for line in told.splitlines())["run_time_ns"])
    return found


def connects(*, quick: bool) -> dict[str, Any]:
    """Blocking."""
    turns, count = (QUICK_TURNS, QUICK_CONNECTS) if quick else (TURNS, CONNECTS)
    binary = Path(tempfile.mkdtemp(prefix="dsec-bench-"), "connects")
    source = Path(__file__).with_name("connects.c")
    subprocess.run(["cc", "-O2", "-o", binary, source], check=True)
    small, large = _rules(1), _rules(RULES)
    samples: dict[str, list[float]] = {"off": [], "1": [], "10k": []}
    hooks: dict[str, list[float]] = {"1": [], "10k": []}
    swaps: list[float] = []
    with namespace() as pid, group() as cgroup:
        inside = open_inside(pid, "")
        stop = threading.Event()
        taker = threading.Thread(target=_accept, args=(inside, stop))
        taker.start()
        try:
            for _ in range(turns):
                plain = (GATE4, GATE_PORT)
                samples["off"].append(_connects(binary, pid, cgroup, plain, count))
                kernel = Kernel(GUEST_BUILD / "bpf" / "egress.o")
                kernel.watch(cgroup)
                numbers: dict[str, int] = {}
                maps = [kernel.policy(numbers), kernel.policy(numbers)]
                maps[0].put(small.entries)
                maps[1].put(large.entries)
                kernel.enforce(inside.cookie, maps[0])
                kernel.register(inside.cookie)
                for name, one in (("1", maps[0]), ("10k", maps[1])):
                    kernel.enforce(inside.cookie, one)
                    samples[name].append(_connects(binary, pid, cgroup, (TARGET, 443), count))
                    with _counted():
                        before = _run_ns(kernel)
                        _connects(binary, pid, cgroup, (TARGET, 443), count)
                        hooks[name].append((_run_ns(kernel) - before) / count / 1e3)
                for number in range(SWAPS):
                    start = time.perf_counter()
                    kernel.enforce(inside.cookie, maps[number % 2])
                    swaps.append(time.perf_counter() - start)
                kernel.close()
        finally:
            stop.set()
            taker.join()
            inside.close()
    figures = {f"connect_us_{k}": round(statistics.median(v), 3) for k, v in samples.items()}
    figures |= {f"hook_us_{k}": round(statistics.median(v), 3) for k, v in hooks.items()}
    return {**figures, "swap_ms": round(statistics.median(swaps) * 1e3, 3)}


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
