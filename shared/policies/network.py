"""Network rules: their grammar, and which one counts for an address or a name. Pure.

    [tcp:|udp:]TARGET[:PORTS]

TARGET is a mirror service (``pypi`` …), a domain, ``*.domain``, an address, a CIDR block
or ``*``; IPv6 before ports stands in brackets. PORTS is ``443``, ``8000-8010`` or ``*``.
Domains and services mean ports 443 and 80, everything else all ports. A rule without a
protocol is about all of them where it denies, about TCP where it allows.

The more specific target counts: a longer name or prefix before a shorter one; of equals
the one that denies. An address that a name resolved to is still subject to every rule
about addresses that denies it.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from shared.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Block = ipaddress.IPv4Network | ipaddress.IPv6Network
Kind = Literal["service", "domain", "block"]
Protocol = Literal["any", "tcp", "udp"]

ALL_PORTS = (0, 65535)
WEB_PORTS = ((443, 443), (80, 80))
SERVICES = frozenset({"pypi", "npm", "github", "go-proxy"})
"""Mirror services a rule may name; a node says which hosts they are."""

NEVER: tuple[Block, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "192.0.0.0/24", "224.0.0.0/3",
        "::/128", "::1/128", "::ffff:0:0/96", "64:ff9b::/96", "2002::/16", "fe80::/10", "ff00::/8",
    )
)  # fmt: skip
"""Reached by no rule: the node itself, its neighbours on the link (cloud metadata among
them), groups, and forms that hide an IPv4 address."""

MAPPED = ipaddress.IPv6Network("::ffff:0:0/96")

PRIVATE: tuple[Block, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
)
"""Reached only by rules that name them, or a name exactly."""

_LABEL = re.compile(r"^(?!-)[a-z0-9_-]{1,63}(?<!-)$")
_PORTS = re.compile(r"^(\*|\d{1,5}(-\d{1,5})?)$")


@dataclass(frozen=True, slots=True)
class NetworkRule:
    """One rule. ``text`` is as the caller wrote it; ``name`` a service or a domain
    (``*.example.org`` for all names below it)."""

    text: str
    allow: bool
    kind: Kind
    name: str = ""
    block: Block | None = None
    ports: tuple[tuple[int, int], ...] = (ALL_PORTS,)
    protocol: Protocol = "any"

    def covers(self, port: int) -> bool:
        """Whether it is about ``port``."""
        return any(low <= port <= high for low, high in self.ports)


def parse(text: str, allow: bool, *, field: str) -> list[NetworkRule]:
    """The rules that ``text`` stands for. Raises ``InvalidRequest`` naming ``field``."""
    rest, protocol = _protocol(text)
    target, ports = _split(rest, field)
    if target == "*":
        blocks: list[Block] = [ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")]
        return [
            NetworkRule(text, allow, "block", block=block, ports=ports or (ALL_PORTS,),
                        protocol=protocol)
            for block in blocks
        ]  # fmt: skip
    if target in SERVICES:
        return [NetworkRule(text, allow, "service", target, None, ports or WEB_PORTS, protocol)]
    found = _block(target)
    if found is not None:
        if allow and any(_within(found, block) for block in NEVER):
            raise InvalidRequest(f"{target} is reached by no rule", field=field)
        found = _unmapped(found)
        return [NetworkRule(text, allow, "block", "", found, ports or (ALL_PORTS,), protocol)]
    return [
        NetworkRule(text, allow, "domain", _domain(target, field), None, ports or WEB_PORTS,
                    protocol)
    ]  # fmt: skip


def _within(inner: Block, outer: Block) -> bool:
    return (
        inner.version == outer.version
        and inner.prefixlen >= outer.prefixlen
        and inner.network_address in outer
    )


def _protocol(text: str) -> tuple[str, Protocol]:
    for protocol in ("tcp", "udp"):
        if text.startswith(f"{protocol}:"):
            return text[4:], protocol
    return text, "any"


def _split(text: str, field: str) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Target and ports; none where the rule names none."""
    if text.startswith("["):
        target, closed, after = text[1:].partition("]")
        if not closed or (after and not after.startswith(":")):
            raise InvalidRequest("not a target in brackets", field=field)
        return target, _ports(after[1:], field) if after else ()
    if text.count(":") != 1:
        return text, ()
    target, _, ports = text.partition(":")
    return target, _ports(ports, field)


def _ports(text: str, field: str) -> tuple[tuple[int, int], ...]:
    if not _PORTS.match(text):
        raise InvalidRequest(f"not ports: {text!r}", field=field)
    if text == "*":
        return (ALL_PORTS,)
    low, _, high = text.partition("-")
    pair = (int(low), int(high or low))
    if not 0 < pair[0] <= pair[1] <= ALL_PORTS[1]:
        raise InvalidRequest(f"not ports: {text!r}", field=field)
    return (pair,)


def _block(text: str) -> Block | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        return None


def _unmapped(block: Block) -> Block:
    """The IPv4 block that an IPv6 one stands for: there is no other traffic to it."""
    if isinstance(block, ipaddress.IPv6Network) and _within(block, MAPPED):
        first = ipaddress.IPv4Address(block.network_address.packed[-4:])
        return ipaddress.IPv4Network((first, block.prefixlen - MAPPED.prefixlen))
    return block


def _domain(text: str, field: str) -> str:
    name = text.lower().rstrip(".")
    labels = name.removeprefix("*.").split(".")
    numeric = labels[-1].isdigit()
    if len(name) > 253 or len(labels) < 2 or numeric or not all(map(_LABEL.match, labels)):
        raise InvalidRequest(
            f"{text!r} is no service, domain, *.domain, address or block", field=field
        )
    return name
