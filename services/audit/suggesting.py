"""The smallest change of policy that lets through what was denied. Pure.

Owns: what each kind of denial would need, and what must not be suggested. Does not own:
applying it; a person decides.

Smallest means: one exact name and port, never a pattern; a mirror that already has a name
instead of the hosts behind it; an address only where no name is known; a file for reading
where nothing was written. Denials that a rule takes for an attack are named with that
rule and not suggested.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from schemas.audit import Suggestion
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

LIMITS = {"pids_limit": "pids", "disk_limit": "disk_mb", "memory_limit": "memory_mb",
          "output_limit": "output_bytes"}  # fmt: skip


def attacks(rules: Iterable[Rule]) -> list[Rule]:
    """Rules whose denials are not to be lifted."""
    return [rule for rule in rules if rule.id not in HARMLESS and rule.threshold == 1]


def suggest(events: Sequence[Event], withheld: Mapping[str, str]) -> list[Suggestion]:
    """Suggestions for denied ``events``; ``withheld`` names the rule that forbids one."""
    counts: dict[tuple[str, str, str], int] = defaultdict(int)
    where: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    reasons: dict[tuple[str, str, str], str] = {}
    for item in events:
        change = _change(item)
        if change is None or item.attribution != "own":
            continue
        key = (*change, withheld.get(item.id, ""))
        counts[key] += item.count
        where[key].add(item.uid)
        reasons.setdefault(key, _reason(item))
    made = [
        Suggestion(
            path=path, value=value, count=count, sandboxes=len(where[path, value, rule]),
            reason=reasons[path, value, rule], withheld=rule,
        )
        for (path, value, rule), count in counts.items()
    ]  # fmt: skip
    made.sort(key=lambda s: (bool(s.withheld), -s.count, s.path, s.value))
    return made[:MAX_SUGGESTIONS]


def _change(item: Event) -> tuple[str, str] | None:
    if item.source == "resource":
        limit = LIMITS.get(item.rule)
        return (f"resources.{limit}", "higher") if limit else None
    if item.verdict != "denied":
        return None
    if item.source in NETWORK:
        return _network(item)
    if item.source in FILES and item.path:
        kind = "read" if item.action in READING else "write"
        return f"files.{kind}", item.path
    if item.source == "seccomp" and item.syscall:
        return "processes.syscalls", item.syscall
    return None


def _network(item: Event) -> tuple[str, str] | None:
    if item.domain:
        for mirror, hosts in MIRRORS.items():
            if any(fnmatch.fnmatchcase(item.domain, host) for host in hosts):
                return "network_rules", mirror
        port = "" if item.port in WEB_PORTS else f":{item.port}"
        return "network.allow", item.domain + port
    if not item.address:
        return None
    address = f"[{item.address}]" if ":" in item.address else item.address
    port = f":{item.port}" if item.port else ""
    protocol = f"/{item.protocol}" if item.protocol not in ("", "tcp") else ""
    return "network.allow", address + port + protocol


def _reason(item: Event) -> str:
    what = item.action or ("reach" if item.source in NETWORK else "use")
    return f"{item.comm or 'a process'} was refused to {what} {item.target}"[:400]
