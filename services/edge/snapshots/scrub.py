"""Residue of use that a packed layer leaves out: rules as data, applied to its tree. Pure.

Owns: what counts as residue, matching, the report. Does not own: git's objects
(:mod:`services.edge.snapshots.scrubgit`), where the tree comes from. The tree is of what
the sandbox changed: what its own layers have at such a place shows again in what is
restored.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schemas.image import Removed
from shared.erofs.layertree import Inode, stored_bytes
from shared.errors import InvalidRequest

REPORTED_MAX = 1_000
"""Removals that are named; the others are counted."""
ANY_MAX = 3
"""Parts ``**`` of a pattern that a caller names."""
ANY_TWICE = ("**", "**")


@dataclass(frozen=True, slots=True)
class Rule:
    """Paths to leave out. ``patterns`` are absolute: ``*`` is anything within a name, a
    part ``**`` any number of names. ``content``: what is in the folder goes, it stays."""

    name: str
    patterns: tuple[str, ...]
    content: bool = False


RULES: tuple[Rule, ...] = (
    Rule(
        "history",
        (
            "/**/.bash_history", "/**/.zsh_history", "/**/.ash_history", "/**/.sh_history",
            "/**/.history", "/**/.python_history", "/**/.node_repl_history", "/**/.lesshst",
            "/**/.psql_history", "/**/.mysql_history", "/**/.sqlite_history", "/**/.viminfo",
            "/**/.irb_history", "/**/.wget-hsts", "/**/.local/share/fish/fish_history",
        ),
    ),
    Rule(
        "credentials",
        (
            "/**/.netrc", "/**/.git-credentials", "/**/.pypirc", "/**/.pgpass", "/**/.npmrc",
            "/**/.vault-token", "/**/.aws/credentials", "/**/.aws/sso", "/**/.azure",
            "/**/.config/gcloud", "/**/.config/gh", "/**/.config/dsec", "/**/.docker/config.json",
            "/**/.kube/config", "/**/.kube/cache", "/**/.cargo/credentials*",
            "/**/.huggingface/token", "/**/.cache/huggingface/token", "/**/.gnupg",
            "/**/.ssh/id_*", "/**/.ssh/known_hosts*", "/**/.claude.json",
            "/**/.claude/.credentials.json", "/**/.codex/auth.json",
            "/etc/ssh/ssh_host_*_key", "/etc/ssh/ssh_host_*_key.pub",
        ),
    ),
    Rule("temporary", ("/tmp", "/var/tmp", "/run", "/dev/shm"), content=True),
    Rule(
        "cache",
        (
            "/root/.cache", "/home/*/.cache", "/var/cache/apt", "/var/cache/apk",
            "/var/cache/dnf", "/var/cache/yum", "/var/lib/apt/lists", "/root/.npm/_cacache",
            "/home/*/.npm/_cacache",
        ),
        content=True,
    ),
    Rule("cache", ("/**/__pycache__", "/**/.pytest_cache", "/**/.mypy_cache", "/**/.ruff_cache")),
    Rule("log", ("/var/log", "/root/.npm/_logs", "/home/*/.npm/_logs"), content=True),
    Rule(
        "identity",
        ("/etc/machine-id", "/var/lib/dbus/machine-id", "/var/lib/systemd/random-seed"),
    ),
)  # fmt: skip
"""What every scrub leaves out."""


@dataclass(slots=True)
class Report:
    """What was left out: the first ones by name, and how many."""

    removed: list[Removed]
    count: int = 0

    def add(self, path: bytes, rule: str, size: int) -> None:
        """One more."""
        self.count += 1
        if len(self.removed) < REPORTED_MAX:
            shown = "/" + path.decode(errors="backslashreplace")
            self.removed.append(Removed(path=shown, rule=rule, bytes=size))


def extra(patterns: Sequence[str]) -> tuple[Rule, ...]:
    """Rules of a project or a caller. Raises ``InvalidRequest``."""
    for pattern in patterns:
        if not pattern.startswith("/") or any(p in ("", ".", "..") for p in _parts(pattern)):
            raise InvalidRequest(f"{pattern!r} is no absolute path", field="remove")
        if _parts(pattern).count("**") > ANY_MAX:
            raise InvalidRequest(f"{pattern!r} has over {ANY_MAX} parts **", field="remove")
    return (Rule("asked", tuple(patterns)),) if patterns else ()


def scrub(
    root: Inode, rules: Iterable[Rule], *, tick: Callable[[int], None] = lambda _done: None
) -> Report:
    """Takes what the rules name out of the tree, in one walk. Whiteouts stay: they hide
    what the layers below have. ``tick`` is called for every entry and may raise."""
    patterns = [
        _Pattern(rule.name, tuple(map(_matcher, _parts(pattern) + ["*"] * rule.content)))
        for rule in rules
        for pattern in rule.patterns
    ]
    report = Report([])
    todo = [(root, b"", _reached(patterns, [(number, 0) for number in range(len(patterns))]))]
    while todo:
        at, path, places = todo.pop()
        for name, inode in list(at.children.items()):
            tick(0)
            rule, further = _step(patterns, places, name)
            below = path + b"/" + name if path else name
            if rule is not None and not inode.is_whiteout:
                del at.children[name]
                report.add(below, rule, stored_bytes(inode))
            elif inode.is_dir and further:
                todo.append((inode, below, _reached(patterns, further)))
    return report


Matcher = bytes | re.Pattern[bytes] | None
"""Of one name; ``None`` is any number of names."""
Place = tuple[int, int]
"""Which pattern, and which of its parts is to match next."""


@dataclass(frozen=True, slots=True)
class _Pattern:
    rule: str
    parts: tuple[Matcher, ...]


def _parts(pattern: str) -> list[str]:
    """Of several ``**`` in a row one says the same; a last one is whatever is below."""
    given = pattern.removeprefix("/").split("/")
    parts = [p for p, before in zip(given, ["", *given], strict=False) if (p, before) != ANY_TWICE]
    return [*parts[:-1], "*"] if parts[-1] == "**" else parts


def _matcher(part: str) -> Matcher:
    if part == "**":
        return None
    return re.compile(fnmatch.translate(part).encode()) if set(part) & set("*?[") else part.encode()


def _reached(patterns: Sequence[_Pattern], places: Iterable[Place]) -> list[Place]:
    """With those after a part that may be no name at all."""
    found = set(places)
    found |= {(number, at + 1) for number, at in found if patterns[number].parts[at] is None}
    return sorted(found)


def _step(
    patterns: Sequence[_Pattern], places: Iterable[Place], name: bytes
) -> tuple[str | None, list[Place]]:
    """The rule that names this entry, if any, and the places in what is below it."""
    further: list[Place] = []
    for number, at in places:
        parts = patterns[number].parts
        part = parts[at]
        if part is None:
            further.append((number, at))
        elif part == name if isinstance(part, bytes) else part.fullmatch(name):
            if at + 1 == len(parts):
                return patterns[number].rule, []
            further.append((number, at + 1))
    return None, further
