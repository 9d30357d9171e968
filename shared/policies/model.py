"""A policy as rules. Pure.

Owns: the normal form that everything else works with, and the names in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from schemas.policy import Limits
from shared.policies.network import NetworkRule

DENIABLE: Mapping[str, str] = {
    "ptrace": "looking into other processes: ptrace, process_vm_*, kcmp",
    "signals": "signals to what is not of the sandbox: the platform, its neighbours",
    "userns": "new user namespaces",
    "mount": "mounting, also by the newer calls",
    "bpf": "bpf and perf_event_open",
    "io_uring": "io_uring",
    "userfaultfd": "userfaultfd",
    "keyring": "the kernel's key rings",
    "raw_sockets": "raw, packet, vsock and kernel crypto sockets",
    "fs_ioctl": "ioctls that swap extents, freeze, shut down or relabel file systems",
}
"""What ``processes.deny`` may name, besides ``ioctl:0x…`` and ``exec:/path``."""


@dataclass(frozen=True, slots=True)
class FileRule:
    """One path. ``optional``: it may be missing when the sandbox starts."""

    path: str
    optional: bool = False


Tree = Literal["read_only", "hidden", "protected"]
TREES: tuple[Tree, ...] = ("read_only", "hidden", "protected")
WATCHED = "watched"
"""What ``files`` may hold besides: nothing of it is denied."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is in force, presets and the present stage worked in."""

    network: tuple[NetworkRule, ...] = ()
    read_only: tuple[FileRule, ...] = ()
    hidden: tuple[FileRule, ...] = ()
    protected: tuple[FileRule, ...] = ()
    watched: tuple[FileRule, ...] = ()
    deny: tuple[str, ...] = ()
    ioctls: tuple[int, ...] = ()
    exec_deny: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    require: tuple[str, ...] = ()
    stage: str = ""
    stages: tuple[str, ...] = ()

    @property
    def reaches_out(self) -> bool:
        """Whether any rule allows something."""
        return any(rule.allow for rule in self.network)

    def files(self, tree: Tree) -> tuple[FileRule, ...]:
        """The rules of a kind."""
        rules: tuple[FileRule, ...] = getattr(self, tree)
        return rules
