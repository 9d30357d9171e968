"""Suggestions are exact, small, and never lift what looks like an attack."""

from __future__ import annotations

from typing import Any

from services.audit.events import Event
from services.audit.settings import Settings
from services.audit.suggesting import suggest, withheld

RULES = list(Settings(pg_dsn="postgresql://x").rules())


def denied(source: str, number: int = 0, **facts: Any) -> Event:
    values = {
        "id": f"{source}{number}", "at": 1.0, "verdict": "denied", "rule": "r", "uid": "u1",
        "comm": "pip", "source": source, **facts,
    }  # fmt: skip
    return Event(**values)


def changes(*events: Event) -> list[tuple[str, str, int]]:
    found = suggest(events, withheld(events, RULES))
    return [(s.path, s.value, s.count) for s in found if not s.withheld]


def test_a_mirror_with_a_name_stands_for_its_hosts() -> None:
    hosts = ("pypi.example", "files.pythonhosted.example")
    events = [denied("dns", n, domain=host) for n, host in enumerate(hosts)]
    assert changes(*events) == [("network", "pypi", 2)]


def test_names_and_ports_are_exact() -> None:
    events = [
        denied("sni", 1, domain="a.example", port=443, address="192.0.2.1", count=4),
        denied("bpf_net", 2, domain="a.example", port=8443, address="192.0.2.1"),
        denied("bpf_net", 3, address="192.0.2.9", port=53, protocol="udp"),
        denied("bpf_net", 4, address="2001:db8::1", port=22),
    ]
    assert changes(*events) == [
        ("network", "a.example", 4), ("network", "[2001:db8::1]:22", 1),
        ("network", "a.example:8443", 1), ("network", "udp:192.0.2.9:53", 1),
    ]  # fmt: skip


def test_one_path_one_call_one_limit() -> None:
    events = [
        denied("landlock", 1, action="open", path="/opt/data/x"),
        denied("apparmor", 2, action="write", path="/opt/out/y"),
        denied("bpf_lsm", 3, rule="files.protected:/etc/z", action="write", path="/opt/z"),
        denied("seccomp", 4, rule="processes.ptrace", syscall="ptrace"),
        denied("resource", 5, rule="pids_limit", verdict="observed"),
    ]
    found = suggest(events, {})
    assert {(s.path, s.value, s.remove) for s in found} == {
        ("files.hidden", "/opt/data/x", True), ("files.read_only", "/opt/out/y", True),
        ("files.protected", "/opt/z", True), ("processes.deny", "ptrace", True),
        ("resources.pids", "higher", False),
    }  # fmt: skip


def test_attacks_are_named_with_their_rule_and_not_suggested() -> None:
    attack = denied("bpf_lsm", action="connect", path="/run/chronus/c.sock")
    assert changes(attack) == []
    (told,) = suggest([attack], {attack.id: "forged_request"})
    assert told.withheld == "forged_request"


def test_a_scan_is_not_suggested_port_by_port() -> None:
    """Nor is it held against what else was denied, or against another sandbox."""
    scan = [denied("bpf_net", n, address="192.0.2.9", port=n, at=float(n)) for n in range(1, 41)]
    name = denied("dns", 100, domain="a.example", at=50.0)
    other = denied("bpf_net", 101, address="192.0.2.9", port=7, uid="u2", at=50.0)
    assert changes(*scan, name, other) == [
        ("network", "192.0.2.9:7", 1), ("network", "a.example", 1),
    ]  # fmt: skip
    assert set(withheld(scan, RULES).values()) == {"port_scan"}
    assert withheld(scan[:20], RULES) == {}


def test_what_was_let_through_or_is_another_nodes_word_asks_for_nothing() -> None:
    seen = denied("sni", 1, verdict="observed", domain="a.example")
    foreign = denied("sni", 2, attribution="foreign", domain="a.example")
    assert changes(seen, foreign) == []
