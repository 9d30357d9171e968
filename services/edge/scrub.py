"""Residue of use that a packed layer leaves out: rules as data, applied to its tree. Pure.

Owns: what counts as residue, matching, the report. Does not own: git's objects
(:mod:`services.edge.scrubgit`), where the tree comes from. The tree is of what the sandbox
changed: what its own layers have at such a place shows again in what is restored.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from schemas.image import Removed
from shared.erofs.layertree import Inode, stored_bytes
from shared.errors import InvalidRequest

REPORTED_MAX = 1_000
"""Removals that are named; the others are counted."""


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
    return (Rule("asked", tuple(patterns)),) if patterns else ()


def scrub(root: Inode, rules: Iterable[Rule]) -> Report:
    """Takes what the rules name out of the tree. Whiteouts stay: they hide what the
    layers below have."""
    report = Report([])
    for rule in rules:
        for pattern in rule.patterns:
            parts = _parts(pattern) + (["*"] if rule.content else [])
            matchers = [None if p == "**" else _matcher(p) for p in parts]
            for holder, name, path in list(_found(root, matchers, b"")):
                inode = holder.children.get(name)
                if inode is not None and not inode.is_whiteout:
                    del holder.children[name]
                    report.add(path, rule.name, stored_bytes(inode))
    return report


Matcher = re.Pattern[bytes] | None
"""Of one name; ``None`` is any number of names."""


def _parts(pattern: str) -> list[str]:
    return pattern.removeprefix("/").split("/")


def _matcher(part: str) -> re.Pattern[bytes]:
    return re.compile(fnmatch.translate(part).encode())


def _found(
    at: Inode, matchers: Sequence[Matcher], path: bytes
) -> Iterator[tuple[Inode, bytes, bytes]]:
    """The entries below ``at`` that match, with the folder each is in."""
    first, rest = matchers[0], matchers[1:]
    if first is None:
        yield from _found(at, rest, path)
    for name, inode in at.children.items():
        below = path + b"/" + name if path else name
        if first is None:
            if inode.is_dir:
                yield from _found(inode, matchers, below)
        elif first.fullmatch(name):
            if not rest:
                yield at, name, below
            elif inode.is_dir:
                yield from _found(inode, rest, below)
