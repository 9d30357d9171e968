"""Rules as data: what a rules file may say, and whether it does. Pure.

Owns: the form of a rule, reading and judging its text. Does not own: the rules
themselves (``rules/*.toml``), applying them (:mod:`services.audit.engine`).

A file that is wrong in any way is refused as a whole, with the rule and the field at
fault: a rule that silently never matches is worse than none.
"""

from __future__ import annotations

import fnmatch
import re
import string
import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from schemas.audit import Response, RuleInfo, Severity
from schemas.sandbox import Tightening
from services.audit.events import Event
from shared import policies
from shared.errors import DsecError, InvalidRequest

MAX_RULES = 500
MAX_PATTERNS = 200
NUMBERS = frozenset({"port", "pid", "targets", "lost"})
"""Fields that are compared as numbers: ``80`` or ``"1000-2000"``."""
TEXTS = frozenset(
    {"source", "verdict", "rule", "mechanism", "attribution", "action", "path", "address",
     "protocol", "domain", "syscall", "subject", "comm", "exe", "user", "project", "job"}
)  # fmt: skip
"""Fields that are compared by shell patterns, of which ``*`` also takes ``/``."""
SHOWN = frozenset(Event.__struct_fields__) | {"target", "measured", "window"}
"""What an explanation may name."""
_RANGE = re.compile(r"(\d{1,9})-(\d{1,9})\Z")

Patterns = Annotated[list[str | int], Meta(min_length=1, max_length=MAX_PATTERNS)]
Conditions = dict[str, Patterns]
"""All of them must hold; each by any of its patterns."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rule: an event that fits one of ``match`` and none of ``unless`` counts; when
    ``measure`` of the events of one ``per`` (a sandbox, a node) reaches ``threshold``
    within ``window_s``, that is a finding. ``measure``: ``events``, different ``targets``,
    ``lost`` events, or a number that the source gives, such as ``dropped_bytes``. The same
    is told again after ``quiet_s``, or when ten times as much has come. ``tighten``: what the
    response of that name does (by default it closes the way out)."""

    id: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{1,47}$(?!\n)")]
    title: Annotated[str, Meta(min_length=1, max_length=120)]
    severity: Severity
    confidence: Annotated[float, Meta(ge=0, le=1)]
    explanation: Annotated[str, Meta(min_length=1, max_length=600)]
    match: Annotated[list[Conditions], Meta(min_length=1, max_length=20)]
    unless: Annotated[list[Conditions], Meta(max_length=20)] = []
    per: Literal["uid", "node"] = "uid"
    measure: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{1,31}$(?!\n)")] = "events"
    threshold: Annotated[int, Meta(ge=1, le=1 << 50)] = 1
    window_s: Annotated[float, Meta(ge=0, le=86_400)] = 0.0
    quiet_s: Annotated[float, Meta(ge=0, le=86_400)] = 300.0
    respond: Response = "alert"
    tighten: Tightening | None = None

    def info(self) -> RuleInfo:
        """What others are told of it."""
        return RuleInfo(
            id=self.id, title=self.title, severity=self.severity, confidence=self.confidence,
            explanation=self.explanation, threshold=self.threshold, window_s=self.window_s,
            measure=self.measure, respond=self.respond,
        )  # fmt: skip


class _File(msgspec.Struct, forbid_unknown_fields=True):
    rule: Annotated[list[Rule], Meta(min_length=1, max_length=MAX_RULES)]


def read(text: str, name: str = "rules") -> list[Rule]:
    """The rules of one file. Raises ``InvalidRequest`` naming file, rule and field."""
    try:
        found = msgspec.convert(tomllib.loads(text), _File).rule
    except tomllib.TOMLDecodeError as exc:
        raise InvalidRequest(f"{name}: {exc}", field="rules") from exc
    except (msgspec.ValidationError, RecursionError) as exc:
        raise InvalidRequest(f"{name}: {exc}", field="rules") from exc
    for rule in found:
        _check(rule, name)
    return found


def collect(files: Mapping[str, str]) -> list[Rule]:
    """The rules of all files (text by name), by id. Raises ``InvalidRequest`` for an id
    that two rules have."""
    found: dict[str, Rule] = {}
    for name, text in sorted(files.items()):
        for rule in read(text, name):
            if rule.id in found:
                raise InvalidRequest(f"{name}: there are two rules {rule.id}", field="rules")
            found[rule.id] = rule
    return [found[key] for key in sorted(found)]


def _check(rule: Rule, name: str) -> None:
    def fail(what: str) -> InvalidRequest:
        return InvalidRequest(f"{name}: rule {rule.id}: {what}", field="rules")

    for conditions in (*rule.match, *rule.unless):
        if not conditions:
            raise fail("an empty match takes everything")
        for field, patterns in conditions.items():
            if field not in TEXTS | NUMBERS:
                raise fail(f"there is no field {field!r}")
            for pattern in patterns:
                _check_pattern(field, pattern, fail)
    try:
        policies.tightened(policies.Policy(), rule.tighten)
    except DsecError as exc:
        raise fail(f"tighten: {exc.message}") from exc
    if rule.threshold > 1 and not rule.window_s:
        raise fail("a threshold needs a window_s")
    try:
        named = {field for _, field, _, _ in string.Formatter().parse(rule.explanation) if field}
    except ValueError as exc:
        raise fail(f"explanation: {exc}") from exc
    if unknown := sorted(named - SHOWN):
        raise fail(f"explanation: there is no {unknown[0]!r}")


def _check_pattern(field: str, pattern: str | int, fail: object) -> None:
    assert callable(fail)
    number = isinstance(pattern, int) or _RANGE.match(pattern) is not None
    if field in NUMBERS and not number:
        raise fail(f"{field}: {pattern!r} is neither a number nor a range")
    if field in TEXTS and isinstance(pattern, int):
        raise fail(f"{field}: {pattern!r} is no text")


class Test:
    """A compiled list of conditions: whether an event fits one of them."""

    __slots__ = ("_alternatives",)

    def __init__(self, alternatives: Iterable[Conditions]) -> None:
        self._alternatives = [
            [_compiled(field, patterns) for field, patterns in conditions.items()]
            for conditions in alternatives
        ]

    def __call__(self, event: Event) -> bool:
        return any(
            all(fits(event, field) for field, fits in conditions)
            for conditions in self._alternatives
        )


class _Text:
    __slots__ = ("_expression", "_words")

    def __init__(self, patterns: list[str]) -> None:
        plain = [p for p in patterns if not re.search(r"[*?\[]", p)]
        self._words = frozenset(plain)
        globs = [fnmatch.translate(p) for p in patterns if p not in self._words]
        self._expression = re.compile("|".join(globs)) if globs else None

    def __call__(self, event: Event, field: str) -> bool:
        value = getattr(event, field)
        return value in self._words or (
            self._expression is not None and self._expression.match(value) is not None
        )


class _Number:
    __slots__ = ("_ranges",)

    def __init__(self, patterns: list[str | int]) -> None:
        self._ranges = [_range(pattern) for pattern in patterns]

    def __call__(self, event: Event, field: str) -> bool:
        value = getattr(event, field)
        return any(low <= value <= high for low, high in self._ranges)


def _range(pattern: str | int) -> tuple[int, int]:
    if isinstance(pattern, int):
        return pattern, pattern
    found = _RANGE.match(pattern)
    assert found is not None
    return int(found[1]), int(found[2])


def _compiled(field: str, patterns: Patterns) -> tuple[str, _Text | _Number]:
    if field in NUMBERS:
        return field, _Number(patterns)
    return field, _Text([str(p) for p in patterns])
