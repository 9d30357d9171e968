"""What of a sandbox is watched under a policy. Pure.

Owns: which paths, and what an opening or a change of each is called. Does not own:
watching them (:mod:`services.edge.sensors`), what it means (audit's rules).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shared.policies import Policy

PROGRAM = "system.program"
"""The rule of a program that others run."""
DECOY = "/run/dsec"
"""Where a sandbox finds what looks like the platform's: nothing of the platform is there."""
KERNEL_MEMORY = (
    "/proc/kcore", "/proc/kmem", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags",
    "/proc/sysrq-trigger",
)  # fmt: skip
"""Told where they are covered: by the engine, or because the policy hides them."""
PROGRAM_FOLDERS = ("/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin")
PROGRAMS = (
    "sh", "bash", "dash", "busybox", "env", "cat", "ls", "git", "python3", "python", "pytest",
    "node", "make", "gcc", "go",
)  # fmt: skip
"""What later commands and graders run. An installation puts a new file in its place by
renaming, or makes what was not there; who overwrites one writes into it, or takes it away."""


@dataclass(frozen=True, slots=True)
class Watched:
    """``mount``: what is laid over the path, with all below it; ``file``: the file that
    is there at the start, or those of a folder. ``denied``: who opens it does not get what it
    asked for. ``required``: it must be there at the start."""

    path: str
    kind: Literal["mount", "file"]
    rule: str
    denied: bool = False
    required: bool = False


@lru_cache(maxsize=64)
def watched(policy: Policy) -> tuple[Watched, ...]:
    """All of it, in the order in which it is looked for."""
    return tuple(_watched(policy))


def _watched(policy: Policy) -> Iterator[Watched]:
    yield Watched(DECOY, "mount", "platform.decoy")
    for rule in policy.hidden:
        yield Watched(rule.path, "mount", "files.hidden", denied=True)
    hidden = {rule.path for rule in policy.hidden}
    for path in KERNEL_MEMORY:
        if path not in hidden:
            yield Watched(path, "mount", "kernel.memory", denied=True)
    for rule in policy.watched:
        yield Watched(rule.path, "file", "files.watched", required=not rule.optional)
    held = tuple(rule.path.rstrip("/") + "/" for rule in policy.read_only)
    for folder in PROGRAM_FOLDERS:
        if not f"{folder}/".startswith(held):
            for name in PROGRAMS:
                yield Watched(f"{folder}/{name}", "file", PROGRAM)
