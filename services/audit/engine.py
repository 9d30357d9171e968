"""Applies rules to events. Pure.

Owns: which events a rule takes, what it has measured in its window, when that is a
finding, and when it is told again. Does not own: where windows are kept between batches
(the store keeps them in the transaction that records the events, which makes a finding
as durable and as single as its evidence), what is done about a finding.

The same events in the same order give the same findings with the same ids, whatever
batches they come in and however often the process restarts between.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass

import msgspec

from schemas.audit import Finding
from services.audit.events import Event
from services.audit.rulebook import Rule, Test
from shared import ids

STEPS = 8
"""A window moves on by eighths of its length."""
MAX_TARGETS = 8_192
"""Different targets that one window tells apart; more are not told from old ones."""
MAX_EVIDENCE = 16
AGAIN_FACTOR = 10
SHOWN_CHARS = 200
ORIGIN = "node:"
FOREIGN = "foreign"
MAX_SOURCES = 100

Key = tuple[str, str]
"""Rule, and the sandbox or node that it measures."""


class Window(msgspec.Struct, omit_defaults=True):
    """What a rule has measured of one sandbox or node. Amounts and targets by step;
    ``told`` is the amount last told at ``told_at``; ``total`` all events since then and
    before."""

    amounts: dict[int, int] = {}
    targets: dict[str, int] = {}
    summaries: dict[int, int] = {}
    evidence: list[str] = []
    first_at: float = 0.0
    last_at: float = 0.0
    total: int = 0
    told: int = 0
    told_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Taken:
    """An event that a rule takes."""

    event: Event
    rule: Rule
    key: Key


class Engine:
    """Rules, compiled."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = {rule.id: rule for rule in rules}
        self._tests = [(rule, Test(rule.match), Test(rule.unless)) for rule in rules]
        # what a node says of another's sandbox is nothing about that sandbox
        self._of_foreign = {r.id for r in rules if any("attribution" in c for c in r.match)}
        self._by_source: dict[str, list[tuple[Rule, Test, Test]]] = {}

    def take(self, events: Iterable[Event]) -> list[Taken]:
        """Which rules take which events, in order."""
        return [
            Taken(event, rule, (rule.id, _measured_of(rule, event)))
            for event in events
            for rule, fits, spared in self._of(event.source)
            if (event.attribution != FOREIGN or rule.id in self._of_foreign)
            and fits(event)
            and not spared(event)
        ]

    def _of(self, source: str) -> list[tuple[Rule, Test, Test]]:
        """Rules that may take an event of ``source``."""
        found = self._by_source.get(source)
        if found is None:
            found = [entry for entry in self._tests if _may_take(entry[0], source)]
            if len(self._by_source) < MAX_SOURCES:  # a node chooses the names of its sources
                self._by_source[source] = found
        return found

    @staticmethod
    def fold(taken: Sequence[Taken], windows: MutableMapping[Key, Window]) -> list[Finding]:
        """Adds events to their windows; returns what is to be told. ``windows`` has what
        was measured before, and has the new ones afterwards."""
        findings = []
        for item in taken:
            window = windows.get(item.key)
            if window is None:
                window = windows[item.key] = Window(first_at=item.event.at)
            measured = _add(window, item.rule, item.event)
            if _is_due(window, item.rule, item.event, measured):
                findings.append(_finding(window, item, measured))
                window.told, window.told_at = max(1, window.total), item.event.at
        return findings


def _may_take(rule: Rule, source: str) -> bool:
    named = [conditions.get("source") for conditions in rule.match]
    return any(
        patterns is None or source in patterns or any("*" in str(p) for p in patterns)
        for patterns in named
    )


def _measured_of(rule: Rule, event: Event) -> str:
    if rule.per == "uid" and event.uid:
        return event.uid
    return ORIGIN + event.node


def _add(window: Window, rule: Rule, event: Event) -> int:
    """The event goes in; returns what the window measures now."""
    if len(window.evidence) < MAX_EVIDENCE:
        window.evidence.append(event.id)
    else:  # the first ones and the newest
        window.evidence[-1] = event.id
    window.total += event.count
    window.last_at = max(window.last_at, event.at)
    if not rule.window_s:
        return _amount(rule, event)
    step = rule.window_s / STEPS
    now, oldest = int(event.at // step), int(window.last_at // step) - STEPS
    if rule.measure == "targets":
        return _add_targets(window, event, now, oldest)
    window.amounts[now] = window.amounts.get(now, 0) + _amount(rule, event)
    _expire(window.amounts, oldest)
    return sum(window.amounts.values())


def _amount(rule: Rule, event: Event) -> int:
    if rule.measure in ("events", "targets"):
        return event.count
    if rule.measure == "lost":
        return event.lost
    return event.numbers.get(rule.measure, 0)


def _add_targets(window: Window, event: Event, now: int, oldest: int) -> int:
    """Different targets: those seen one by one, or as many as summaries stand for. What is
    in two summaries counts twice: a summary names only some of its targets."""
    for target in event.samples or (event.target,):
        if target in window.targets or len(window.targets) < MAX_TARGETS:
            window.targets[target] = max(now, window.targets.get(target, now))
    window.summaries[now] = window.summaries.get(now, 0) + event.targets
    for target in [target for target, at in window.targets.items() if at <= oldest]:
        del window.targets[target]
    _expire(window.summaries, oldest)
    return max(len(window.targets), sum(window.summaries.values()))


def _expire(steps: dict[int, int], oldest: int) -> None:
    for step in [step for step in steps if step <= oldest]:
        del steps[step]


def _is_due(window: Window, rule: Rule, event: Event, measured: int) -> bool:
    if measured < rule.threshold:
        return False
    if not window.told or event.at - window.told_at >= rule.quiet_s:
        return True
    return window.total >= window.told * AGAIN_FACTOR


def _finding(window: Window, item: Taken, measured: int) -> Finding:
    rule, event = item.rule, item.event
    return Finding(
        id=ids.derived(f"{rule.id}/{item.key[1]}/{event.id}"), at=event.at,
        project=event.project, severity=rule.severity, rule=rule.id, title=rule.title,
        explanation=_explained(rule, event, measured), confidence=rule.confidence,
        uid=event.uid or None, principal=event.principal or None, node=event.node,
        job=event.job or None, task=event.task or None, evidence=list(window.evidence),
        count=measured, total=window.total, first_at=window.first_at, response=rule.respond,
        tighten=rule.tighten,
    )  # fmt: skip


def _explained(rule: Rule, event: Event, measured: int) -> str:
    facts = {name: _shown(getattr(event, name)) for name in Event.__struct_fields__}
    facts["comm"] = facts["comm"] or "a process"
    facts |= {"target": _shown(event.target), "measured": str(measured),
              "window": f"{rule.window_s:g} s"}  # fmt: skip
    return rule.explanation.format_map(facts)


def _shown(value: object) -> str:
    """Text from a sandbox, for people to read: one line, no controls, not endless."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in str(value)[: SHOWN_CHARS + 1])
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"
