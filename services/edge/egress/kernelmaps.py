"""The maps of ``guest/bpf/egress.bpf.c`` in terms of rules.

Owns: their byte layout, one policy map a sandbox, exact counts of denials. Does not own:
which rules (:mod:`services.edge.policy.reach`), the library (:mod:`.libbpf`).
"""

from __future__ import annotations

import ipaddress
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from services.edge.egress.libbpf import Map, Programs, Ring
from services.edge.policy.reach import DEFAULT, Entry, Reach
from shared.policies.network import MAPPED, Address

GATE4, GATE6, GATE_PORT = "192.0.0.8", "fd64:7365:6300::1", 1
PROGRAMS = ("out_connect4", "out_connect6", "out_sendmsg4", "out_sendmsg6")
NO_POLICY, DEFAULT_RULE = 0xFFFF, 0
ORIGINS = 65536
MISSING = "missing policy"
_COOKIE = struct.Struct("<Q")
_SANDBOX = struct.Struct("<4Q")
_HOST = struct.pack("<I", 32 + 128)
"""Keys that begin so are about one address, and in a map of their own without it."""
_PORT = struct.Struct("<HHBxH")
_NUMBER = struct.Struct("<I")
_ORIGIN = struct.Struct("<16sQIIH6x")
_DENIAL = struct.Struct("<Q16sHBBI")
_TIMES = struct.Struct("<3Q")
_EVENT = struct.Struct(f"<QQII{_DENIAL.size}s16s")
VALUE_BYTES = 8 + 8 * _PORT.size
PROTOCOLS = {6: "tcp", 17: "udp", 1: "icmp", 58: "icmp"}
ACTIONS = {1: "connect", 2: "send"}


@dataclass(frozen=True, slots=True)
class Denial:
    """A destination that was denied, and by which rule."""

    netns: int
    address: str
    port: int
    protocol: str
    action: str
    rule: int


@dataclass(frozen=True, slots=True)
class Event:
    """One denial with its process. ``at`` is the kernel's monotonic clock in seconds,
    ``key`` what :func:`denial` reads."""

    at: float
    pid: int
    uid: int
    comm: str
    netns: int
    key: bytes


def address_bytes(address: Address) -> bytes:
    """IPv4 as the IPv6 address that stands for it."""
    raw = address.packed
    return raw if len(raw) == 16 else bytes(10) + b"\xff\xff" + raw


def _shown(raw: bytes) -> Address:
    found = ipaddress.IPv6Address(raw)
    return found.ipv4_mapped or found


def denial(raw: bytes) -> Denial:
    """What a key of the map of denials says."""
    netns, address, port, protocol, action, rule = _DENIAL.unpack(raw)
    return Denial(
        netns, str(_shown(address)), port, PROTOCOLS.get(protocol, f"ip-{protocol}"),
        ACTIONS.get(action, ""), rule,
    )  # fmt: skip


def target(raw: bytes) -> bytes:
    """Address and port of such a key, to tell targets apart."""
    return raw[_COOKIE.size : _COOKIE.size + 18]


_Part = tuple[bytes, bytes, bytes]
"""What is before the map's number in a key and what is behind it, and the value."""


@dataclass(frozen=True, slots=True)
class _Filling:
    """A reach as it lies in a map that is new, with the numbers of its rules."""

    parts: tuple[_Part, ...]
    rules: Mapping[str, int]


_fillings: WeakKeyDictionary[Reach, _Filling] = WeakKeyDictionary()


def _encoded(entries: Iterable[Entry], rules: dict[str, int]) -> Iterator[_Part]:
    for entry in entries:
        if entry.block.version == 6 and entry.block.subnet_of(MAPPED):
            continue  # in the kernel's map that is IPv4 itself
        ports = b"".join(
            _PORT.pack(r.low, r.high, r.allow, rules.setdefault(r.rule, _next(rules)))
            for r in entry.ports
        )
        value = struct.pack("<II", len(entry.ports), 0) + ports
        yield *_where(entry), value.ljust(VALUE_BYTES, b"\0")


def _next(rules: Mapping[str, int]) -> int:
    return min(len(rules), NO_POLICY - 1)


def _where(entry: Entry) -> tuple[bytes, bytes]:
    block = entry.block
    length = 32 + block.prefixlen + (96 if block.version == 4 else 0)
    return _NUMBER.pack(length), address_bytes(block.network_address)


class PolicyMap:
    """The rules of one sandbox in the kernel, under a number of their own. Filled before
    it is put into force. ``rules`` numbers their texts, the same over all that follow."""

    def __init__(self, trie: Map, hosts: Map, number: int, rules: dict[str, int]) -> None:
        self._trie, self._hosts = trie, hosts
        self.number = number
        self._own = _NUMBER.pack(number)
        self._keys: set[bytes] = set()
        self._rules = rules
        rules.setdefault(DEFAULT, DEFAULT_RULE)

    def fill(self, reach: Reach) -> None:
        """Sets all that counts for a reach. Raises ``OSError``."""
        if len(self._rules) > 1:  # they have numbers already
            self.put(reach.entries)
            return
        known = _fillings.get(reach)
        if known is None:
            rules = dict(self._rules)
            parts = tuple(_encoded(reach.entries, rules))
            known = _fillings[reach] = _Filling(parts, rules)
        self._rules.update(known.rules)
        self._put(known.parts)

    def put(self, entries: Iterable[Entry]) -> None:
        """Sets what counts for blocks. Raises ``OSError``."""
        self._put(_encoded(entries, self._rules))

    def _put(self, parts: Iterable[_Part]) -> None:
        for length, address, value in parts:
            self._set(length + self._own + address, value)

    def _set(self, key: bytes, value: bytes) -> None:
        within, its = self._place(key)
        try:
            within.set(its, value)
        except OSError:
            if key not in self._keys:
                raise
            # a trie that is full does not even replace: what was goes first
            self._delete(key)
            within.set(its, value)
        self._keys.add(key)

    def _place(self, key: bytes) -> tuple[Map, bytes]:
        if key.startswith(_HOST):
            return self._hosts, key[len(_HOST) :]
        return self._trie, key

    def _delete(self, key: bytes) -> None:
        within, its = self._place(key)
        within.delete(its)
        self._keys.discard(key)

    def remove(self, entry: Entry) -> None:
        length, address = _where(entry)
        self._delete(length + self._own + address)

    def rule(self, number: int) -> str:
        """The text of a rule that an event names."""
        if number == NO_POLICY:
            return MISSING
        return next((text for text, n in self._rules.items() if n == number), DEFAULT)

    def close(self) -> None:
        """Takes its rules out; it is in force nowhere any more."""
        for key in list(self._keys):
            self._delete(key)


class Kernel:
    """The loaded programs. Raises ``Unsupported`` where the kernel or the library is
    not what they need."""

    def __init__(self, path: Path) -> None:
        self._programs = Programs(path)
        self._sandboxes = self._programs.map("sandboxes")
        self._policies = self._programs.map("policies")
        self._rules, self._hosts = self._programs.map("rules"), self._programs.map("hosts")
        self._last_policy = 0
        self._origins = self._programs.map("origins")
        self._denials = self._programs.map("denials")
        self._groups: dict[str, int] = {}
        self._watching = threading.Lock()
        self._reading, self._closed = threading.Lock(), False

    def watch(self, group: Path) -> None:
        """Attaches to a control group, once; again where it was made anew. For any thread."""
        with self._watching:  # attached twice, a program would count twice
            group.mkdir(exist_ok=True)
            inode = group.stat().st_ino
            if self._groups.get(str(group)) == inode:
                return
            fd = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for program in PROGRAMS:
                    self._programs.attach(program, fd)
            finally:
                os.close(fd)
            self._groups[str(group)] = inode

    def policy(self, rules: dict[str, int]) -> PolicyMap:
        """An empty policy: nothing is allowed."""
        self._last_policy += 1
        return PolicyMap(self._rules, self._hosts, self._last_policy, rules)

    def register(self, netns: int) -> None:
        """From here on a namespace is a sandbox's: until it has a policy it reaches
        nothing."""
        self._sandboxes.set(_COOKIE.pack(netns), _SANDBOX.pack(0, 0, 0, 0))
        self.drop_policy(netns)

    def enforce(self, netns: int, policy: PolicyMap) -> None:
        """Puts ``policy`` into force for a namespace, at once and as a whole."""
        self._policies.set(_COOKIE.pack(netns), _NUMBER.pack(policy.number))

    def drop_policy(self, netns: int) -> None:
        """Takes the policy and leaves the sandbox: it reaches nothing."""
        self._policies.set(_COOKIE.pack(netns), _NUMBER.pack(0))

    def forget(self, netns: int) -> None:
        """The sandbox is gone."""
        self._policies.delete(_COOKIE.pack(netns))
        self._sandboxes.delete(_COOKIE.pack(netns))

    def origin(self, netns: int, mark: int) -> tuple[Address, int, int] | None:
        """Where a connection that came to the gate with a mark was to go: address, port,
        and the process that made it. None where none of the namespace has this mark."""
        raw = self._origins.get(_NUMBER.pack(mark % ORIGINS), _ORIGIN.size)
        if raw is None:
            return None
        address, of, number, pid, port = _ORIGIN.unpack(raw)
        if not mark or (of, number) != (netns, mark):
            return None  # it came by itself, or so many came after it
        return _shown(address), port, pid

    def denied(self, netns: int) -> int:
        """How many attempts of a sandbox were denied, exactly."""
        raw = self._sandboxes.get(_COOKIE.pack(netns), _SANDBOX.size)
        return int(_SANDBOX.unpack(raw)[0]) if raw else 0

    def count(self, key: bytes) -> int:
        """How often a destination was denied, exactly while it is not forgotten."""
        raw = self._denials.get(key, _TIMES.size)
        return int(_TIMES.unpack(raw)[0]) if raw else 0

    def denials(self, netns: Collection[int]) -> dict[int, dict[bytes, int]]:
        """Exact counts per destination, of those that are not the oldest, for some
        namespaces. Blocks for some ten milliseconds; for any thread."""
        found: dict[int, dict[bytes, int]] = {one: {} for one in netns}
        with self._reading:
            if self._closed:
                return found
            for key, value in self._denials.items(_DENIAL.size, _TIMES.size):
                mine = found.get(_COOKIE.unpack_from(key)[0])
                if mine is not None:
                    mine[key] = int(_TIMES.unpack(value)[0])
        return found

    def events(self, take: Callable[[Event], None]) -> Ring:
        """The ring of events; whoever asks closes it."""

        def sample(raw: bytes) -> None:
            at, _, pid, uid, what, comm = _EVENT.unpack(raw[: _EVENT.size])
            name = comm.split(b"\0")[0].decode(errors="replace")
            take(Event(at / 1e9, pid, uid, name, _COOKIE.unpack_from(what)[0], what))

        return self._programs.ring(self._programs.map("events"), sample)

    def close(self) -> None:
        with self._reading:  # a map that is being read stays until then
            self._closed = True
            self._programs.close()
