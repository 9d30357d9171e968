"""The smallest change of policy that lets through what was denied. Pure.

Owns: what each kind of denial would need, and what must not be suggested. Does not own:
applying it; a person decides.

Smallest means: one exact name and port, never a pattern; a mirror that already has a name
instead of the hosts behind it; an address only where no name is known; one path, one
call. Denials that a rule takes for an attack are named with that
rule and not suggested.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas.audit import Suggestion
from services.audit.engine import Engine
from services.audit.events import Event
from services.audit.rulebook import Rule

MIRRORS: Mapping[str, tuple[str, ...]] = {
    "pypi": ("pypi.*", "*.pypi.*", "files.pythonhosted.*"),
    "npm": ("registry.npmjs.*", "*.npmjs.*"),
    "github": ("github.*", "*.github.*", "*.githubusercontent.*"),
    "go-proxy": ("proxy.golang.*", "sum.golang.*"),
}
"""Named mirrors and the hosts that stand for them."""
NETWORK = frozenset({"bpf_net", "dns", "sni"})
FILES = frozenset({"apparmor", "bpf_lsm", "landlock"})
READING = frozenset({"", "open", "read", "getattr", "exec"})
HARMLESS = frozenset({"egress_attempt", "newer_release_fetch"})
"""Rules that say no more than that something was denied."""
WEB_PORTS = frozenset({0, 80, 443, 53})
MAX_SUGGESTIONS = 200

LIMITS = {"pids_limit": "resources.pids", "disk_limit": "resources.disk_mb",
          "output_limit": "resources.output_bytes", "memory_limit": "memory_limit_mb"}  # fmt: skip
"""Limits by the rule that tells of them: in the policy, or beside it."""
TREES = ("files.hidden", "files.read_only", "files.protected")
DENIALS = "processes."


@dataclass(frozen=True, slots=True)
class Change:
    """``value`` is added at ``path`` of the policy, or removed there."""

    path: str
    value: str
    remove: bool = False


def attacks(rules: Iterable[Rule]) -> list[Rule]:
    """Rules whose denials are not to be lifted."""
    return [rule for rule in rules if rule.id not in HARMLESS and rule.threshold == 1]


def scans(rules: Iterable[Rule]) -> list[Rule]:
    """Rules that take many different targets for an attack, of which each alone is none."""
    return [rule for rule in rules if rule.measure == "targets" and rule.threshold > 1]


def withheld(events: Sequence[Event], rules: Iterable[Rule]) -> dict[str, str]:
    """Events, oldest first, whose denials are not to be lifted, and the rule that says so."""
    known = list(rules)
    scanning = Engine(scans(known))
    taken = scanning.take(events)
    found = {(f.rule, f.uid) for f in scanning.fold(taken, {})}
    parts = {i.event.id: i.rule.id for i in taken if (i.rule.id, i.event.uid) in found}
    return parts | {i.event.id: i.rule.id for i in Engine(attacks(known)).take(events)}


def suggest(events: Sequence[Event], withheld: Mapping[str, str]) -> list[Suggestion]:
    """Suggestions for denied ``events``; ``withheld`` names the rule that forbids one."""
    counts: dict[tuple[Change, str], int] = defaultdict(int)
    where: dict[tuple[Change, str], set[str]] = defaultdict(set)
    reasons: dict[tuple[Change, str], str] = {}
    for item in events:
        change = _change(item)
        if change is None or item.attribution != "own":
            continue
        key = (change, withheld.get(item.id, ""))
        counts[key] += item.count
        where[key].add(item.uid)
        reasons.setdefault(key, _reason(item))
    made = [
        Suggestion(
            path=change.path, value=change.value, remove=change.remove, count=count,
            sandboxes=len(where[change, rule]), reason=reasons[change, rule], withheld=rule,
        )
        for (change, rule), count in counts.items()
    ]  # fmt: skip
    made.sort(key=lambda s: (bool(s.withheld), -s.count, s.path, s.value))
    return made[:MAX_SUGGESTIONS]


def _change(item: Event) -> Change | None:
    if item.source == "resource":
        limit = LIMITS.get(item.rule)
        return Change(limit, "higher") if limit else None
    if item.verdict != "denied":
        return None
    if item.source in NETWORK:
        rule = _network(item)
        return Change("network", rule) if rule else None
    if item.source in FILES and item.path:
        named = next((tree for tree in TREES if item.rule.startswith(tree)), None)
        reading = item.action in READING
        return Change(named or TREES[0 if reading else 1], item.path, remove=True)
    if item.source == "seccomp" and item.rule.startswith(DENIALS):
        return Change("processes.deny", item.rule.removeprefix(DENIALS), remove=True)
    return None


def _network(item: Event) -> str | None:
    """A rule of the policy's grammar."""
    web = item.port in WEB_PORTS
    if item.domain:
        for mirror, hosts in MIRRORS.items():
            if web and any(fnmatch.fnmatchcase(item.domain, host) for host in hosts):
                return mirror
        return item.domain if web else f"{item.domain}:{item.port}"
    if not item.address:
        return None
    address = f"[{item.address}]" if ":" in item.address else item.address
    protocol = "udp:" if item.protocol == "udp" else ""
    return protocol + address + (f":{item.port}" if item.port else "")


def _reason(item: Event) -> str:
    what = item.action or ("reach" if item.source in NETWORK else "use")
    return f"{item.comm or 'a process'} was refused to {what} {item.target}"[:400]
