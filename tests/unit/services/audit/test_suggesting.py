"""Suggestions are exact, small, and never lift what looks like an attack."""

from __future__ import annotations

from typing import Any

from services.audit.engine import Engine
from services.audit.events import Event
from services.audit.settings import Settings
from services.audit.suggesting import attacks, suggest

RULES = attacks(Settings(pg_dsn="postgresql://x").rules())


def denied(source: str, number: int = 0, **facts: Any) -> Event:
    values = {
        "id": f"{source}{number}", "at": 1.0, "verdict": "denied", "rule": "r", "uid": "u1",
        "comm": "pip", "source": source, **facts,
    }  # fmt: skip
    return Event(**values)


def changes(*events: Event) -> list[tuple[str, str, int]]:
    withheld = {item.event.id: item.rule.id for item in Engine(RULES).take(events)}
    return [(s.path, s.value, s.count) for s in suggest(events, withheld) if not s.withheld]


def test_a_mirror_with_a_name_stands_for_its_hosts() -> None:
    hosts = ("pypi.example", "files.pythonhosted.example")
    events = [denied("dns", n, domain=host) for n, host in enumerate(hosts)]
    assert changes(*events) == [("network_rules", "pypi", 2)]


def test_names_and_ports_are_exact() -> None:
    events = [
        denied("sni", 1, domain="a.example", port=443, address="192.0.2.1", count=4),
        denied("bpf_net", 2, domain="a.example", port=8443, address="192.0.2.1"),
        denied("bpf_net", 3, address="192.0.2.9", port=53, protocol="udp"),
        denied("bpf_net", 4, address="2001:db8::1", port=22),
    ]
    assert changes(*events) == [
        ("network.allow", "a.example", 4), ("network.allow", "192.0.2.9:53/udp", 1),
        ("network.allow", "[2001:db8::1]:22", 1), ("network.allow", "a.example:8443", 1),
    ]  # fmt: skip


def test_a_file_that_was_read_is_suggested_for_reading() -> None:
    events = [
        denied("landlock", 1, action="open", path="/opt/data/x"),
        denied("apparmor", 2, action="write", path="/opt/out/y"),
        denied("resource", 3, rule="pids_limit", verdict="observed"),
    ]
    assert set(changes(*events)) == {
        ("files.read", "/opt/data/x", 1), ("files.write", "/opt/out/y", 1),
        ("resources.pids", "higher", 1),
    }  # fmt: skip


def test_attacks_are_named_with_their_rule_and_not_suggested() -> None:
    attack = denied("bpf_lsm", action="connect", path="/run/chronus/c.sock")
    assert changes(attack) == []
    (told,) = suggest([attack], {attack.id: "forged_request"})
    assert told.withheld == "forged_request"


def test_what_was_let_through_or_is_another_nodes_word_asks_for_nothing() -> None:
    seen = denied("sni", 1, verdict="observed", domain="a.example")
    foreign = denied("sni", 2, attribution="foreign", domain="a.example")
    assert changes(seen, foreign) == []
