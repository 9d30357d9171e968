"""What network rules mean for an address and for a name. Pure.

Owns: the order of rules, inherited ports, private and forbidden ranges, which address a
name may open. Does not own: the grammar (:mod:`shared.policies.network`), maps and
sockets (:mod:`services.edge.egress`). One :class:`Reach` is the truth of both the
kernel's map and the gate, so that the two never differ.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.policies.network import ALL_PORTS, NEVER, PRIVATE, Address, Block, NetworkRule

PORT_RULES_MAX = 8
"""Of one entry of the kernel's map."""
DEFAULT = "default"
"""The rule's name where no rule allows."""
FORBIDDEN = "never"
PRIVATE_RANGE = "private"


@dataclass(frozen=True, slots=True)
class PortRule:
    """What counts for ports ``low`` to ``high`` of an address."""

    low: int
    high: int
    allow: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Entry:
    """All that counts for a block, in order; a later match is never reached."""

    block: Block
    ports: tuple[PortRule, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``rule`` is the text of the rule that counted."""

    allow: bool
    rule: str


class Reach:
    """The compiled network rules of one sandbox. ``services``: hosts of mirror services,
    each a domain or ``*.domain``."""

    def __init__(self, rules: Sequence[NetworkRule], services: Mapping[str, Sequence[str]]) -> None:
        blocks = [r for r in rules if r.block is not None and r.protocol != "udp"]
        self._denied = [r for r in blocks if not r.allow]
        self._blocks = _Blocks()
        self.entries = _entries(blocks, self._blocks)
        self._names = _names(rules, services)

    @property
    def by_name(self) -> bool:
        """Whether any name is allowed."""
        return any(rule.allow for found in self._names.values() for rule in found)

    def entry(self, address: Address) -> Entry | None:
        """The most specific entry that holds ``address``."""
        return self._blocks.holding(address)

    def address(self, address: Address, port: int) -> Verdict:
        """What counts for an address on its own, whatever its name."""
        entry = self.entry(address)
        for rule in entry.ports if entry else ():
            if rule.low <= port <= rule.high:
                return Verdict(rule.allow, rule.rule)
        return Verdict(False, DEFAULT)

    def name(self, name: str) -> list[NetworkRule]:
        """The rules that count for a name: those of the most specific pattern, or none.
        They may allow some ports and deny others; who denies counts."""
        name = name.lower().rstrip(".")
        labels = name.split(".")
        patterns = [name] + ["*." + ".".join(labels[n:]) for n in range(1, len(labels))]
        for pattern in patterns:
            if pattern in self._names:
                return self._names[pattern]
        return []

    def named(self, name: str) -> Verdict:
        """Whether a name may be resolved: some port of it is allowed."""
        rules = self.name(name)
        for rule in rules:
            if rule.allow and self.ports(name):
                return Verdict(True, rule.text)
        return Verdict(False, rules[0].text if rules else DEFAULT)

    def ports(self, name: str) -> list[tuple[int, int]]:
        """The ports that a name opens."""
        rules = self.name(name)
        denied = [pair for rule in rules if not rule.allow for pair in rule.ports]
        if ALL_PORTS in denied:
            return []
        allowed = [p for rule in rules if rule.allow and rule.protocol != "udp" for p in rule.ports]
        return [
            pair for pair in dict.fromkeys(allowed)
            if not any(low <= pair[0] and pair[1] <= high for low, high in denied)
        ]  # fmt: skip

    def may_open(self, name: str, address: Address) -> Verdict:
        """Whether ``address``, to which ``name`` resolved, may be reached by it: not
        where a rule about addresses denies it, nor into private ranges unless the
        name was named exactly (else whoever answers for a wildcard gets inside)."""
        if any(_holds(block, address) for block in NEVER):
            return Verdict(False, FORBIDDEN)
        for rule in self._denied:
            if rule.block is not None and _holds(rule.block, address) and ALL_PORTS in rule.ports:
                return Verdict(False, rule.text)
        exact = name.lower().rstrip(".") in self._names
        if not exact and any(_holds(block, address) for block in PRIVATE):
            return Verdict(False, PRIVATE_RANGE)
        return Verdict(True, next((r.text for r in self.name(name) if r.allow), DEFAULT))

    def through(self, name: str, address: Address, port: int) -> Verdict:
        """Whether a port of ``address`` may be reached as ``name``: the name opens the
        port, it may open the address, and no rule about the address denies the port."""
        ports = self.ports(name)
        if not any(low <= port <= high for low, high in ports):
            return Verdict(False, self.named(name).rule)
        verdict = self.may_open(name, address)
        if not verdict.allow:
            return verdict
        for rule in self.opened(address, ports).ports:
            if rule.low <= port <= rule.high:
                return Verdict(rule.allow, rule.rule)
        return Verdict(False, DEFAULT)

    def opened(self, address: Address, ports: Iterable[tuple[int, int]]) -> Entry:
        """The entry of an address that names opened: denials of rules about it stay."""
        inherited = self.entry(address)
        before = tuple(
            r for r in (inherited.ports if inherited else ())
            if not r.allow and r.rule not in (PRIVATE_RANGE, FORBIDDEN, DEFAULT)
        )  # fmt: skip
        opens = tuple(PortRule(low, high, True, "name") for low, high in ports)
        after = inherited.ports if inherited else ()
        unique = tuple(dict.fromkeys((*before, *opens, *after)))[:PORT_RULES_MAX]
        return Entry(ipaddress.ip_network(address), unique)


class _Blocks:
    """Entries by the length of their prefix: one look for each length there is."""

    def __init__(self) -> None:
        self._by_length: dict[tuple[int, int], dict[int, Entry]] = {}
        self._lengths: dict[int, list[int]] = {4: [], 6: []}

    def add(self, entry: Entry) -> None:
        """Entries come with the shortest prefix first."""
        version, length = entry.block.version, entry.block.prefixlen
        if (version, length) not in self._by_length:
            self._by_length[version, length] = {}
            self._lengths[version].insert(0, length)
        self._by_length[version, length][int(entry.block.network_address)] = entry

    def holding(self, address: Address) -> Entry | None:
        """The most specific entry that holds ``address``."""
        number = int(address)
        for length in self._lengths[address.version]:
            shift = address.max_prefixlen - length
            found = self._by_length[address.version, length].get(number >> shift << shift)
            if found is not None:
                return found
        return None


def _holds(block: Block, address: Address) -> bool:
    return block.version == address.version and address in block


def _entries(rules: Sequence[NetworkRule], found: _Blocks) -> list[Entry]:
    own: dict[Block, list[PortRule]] = {}
    for rule in sorted(rules, key=lambda r: r.allow):  # of equals the one that denies
        assert rule.block is not None
        own.setdefault(rule.block, []).extend(
            PortRule(low, high, rule.allow, rule.text) for low, high in rule.ports
        )
    for block in PRIVATE:
        own.setdefault(block, []).append(PortRule(*ALL_PORTS, False, PRIVATE_RANGE))
    for block in NEVER:
        own[block] = [PortRule(*ALL_PORTS, False, FORBIDDEN)]
    done: list[Entry] = []
    for block in sorted(own, key=lambda b: b.prefixlen):
        parent = found.holding(block.network_address)
        inherited = parent.ports if parent else ()
        entry = Entry(block, _reached([*own[block], *inherited], block))
        found.add(entry)
        done.append(entry)
    return done


def _reached(rules: list[PortRule], block: Block) -> tuple[PortRule, ...]:
    found: list[PortRule] = []
    for rule in rules:
        if any(r.low <= rule.low and rule.high <= r.high for r in found):
            continue
        found.append(rule)
    if len(found) > PORT_RULES_MAX:
        raise InvalidRequest(
            f"more than {PORT_RULES_MAX} rules about ports meet on {block}", field="network_rules"
        )
    return tuple(found)


def _names(
    rules: Sequence[NetworkRule], services: Mapping[str, Sequence[str]]
) -> dict[str, list[NetworkRule]]:
    """Patterns to their rules, those that deny first; a service's hosts never come over
    a rule that names the host itself."""
    found: dict[str, list[NetworkRule]] = {}
    for rule in rules:
        if rule.kind == "domain":
            found.setdefault(rule.name, []).append(rule)
    for rule in rules:
        if rule.kind == "service":
            for host in services.get(rule.name, ()):
                present = found.get(host, [])
                if all(r.kind == "service" for r in present):
                    found.setdefault(host, []).append(rule)
    return {name: sorted(r, key=lambda x: x.allow) for name, r in found.items()}


def parse_services(text: str) -> dict[str, list[str]]:
    """``pypi=a.example,*.b.example;npm=c.example``. Raises ``InvalidRequest``."""
    found: dict[str, list[str]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, given, hosts = part.partition("=")
        if not given or not hosts:
            raise InvalidRequest(f"not SERVICE=HOST,…: {part!r}", field="services")
        found[name.strip()] = [h.strip().lower() for h in hosts.split(",") if h.strip()]
    return found
