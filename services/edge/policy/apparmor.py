"""A policy as an AppArmor profile. Pure.

Owns: the text. Does not own: loading it, which needs a kernel with AppArmor; whether there
is one is asked of the kernel (an engine takes a profile's name on any machine, and where
there is no AppArmor it applies none and says nothing).

Denials are ``audit deny``: a plain one is silent. AppArmor knows nothing of ports,
addresses, requests of ioctl or the paths of Unix sockets: those have other enforcers. The
names of programs that stop a sandbox are peers that may signal it, or a graceful stop
becomes a kill.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shared.errors import InvalidRequest
from shared.policies import Policy
from shared.policies.model import TREES, FileRule

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$(?!\n)")
SPECIAL = re.compile(r"[\s\"#@,]")
GLOB = re.compile(r"([*?\[\]{}^\\])")
ALWAYS = (
    "audit deny mount,", "audit deny pivot_root,", "audit deny /sys/** wl,",
    "audit deny @{PROC}/sysrq-trigger rwl,", "audit deny @{PROC}/kcore rwl,",
    "audit deny @{PROC}/sys/** wl,", "audit deny /dev/mem rwl,", "audit deny /dev/kmem rwl,",
)  # fmt: skip
"""Whatever the policy says: what an engine's own profile denies, which this one replaces."""
OPERATIONS = {"umount": "mount", "pivotroot": "mount", "create": "raw_sockets"}
STOPPERS = ("unconfined", "docker-default", "runc", "crun")


def profile(name: str, policy: Policy) -> str:
    """The text of the profile ``name``. Raises ``InvalidRequest`` for a name that is
    none."""
    if not NAME.match(name):
        raise InvalidRequest(f"not a profile's name: {name!r}", field="policy")
    lines = [
        "abi <abi/3.0>,", "#include <tunables/global>", "",
        f"profile {name} flags=(attach_disconnected,mediate_deleted) {{",
        "  file,", "  capability,", "  umount,", "  network inet,", "  network inet6,",
        "  network unix,", "  network netlink,",
        f"  signal (send,receive) peer={name},",
        *(f"  signal (receive) peer={peer}," for peer in STOPPERS),
        f"  ptrace (trace,read,tracedby,readby) peer={name},",
        *(f"  {rule}" for rule in (*ALWAYS, *_rules(policy))),
        "}",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _rules(policy: Policy) -> Iterator[str]:
    for rule in policy.read_only:
        yield from _both(rule, "wl")
    for rule in policy.hidden:
        yield from _both(rule, "rwlkmx")
    for rule in policy.protected:
        yield f"audit deny {quoted(rule.path)} wl,"
    for path in policy.exec_deny:
        yield f"audit deny {quoted(path)} mx,"
    if "ptrace" in policy.deny:
        yield "audit deny ptrace (trace),"
    if "raw_sockets" in policy.deny:
        yield "audit deny network packet,"
        yield "audit deny network raw,"
    if "bpf" in policy.deny:
        yield "audit deny capability sys_admin,"


def rule_of(policy: Policy, operation: str, path: str) -> str:
    """The rule of ``policy`` that a denial is of, as ``enforcement`` names it."""
    if operation == "exec" and path in policy.exec_deny:
        return "processes.exec"
    for tree in TREES:
        for rule in policy.files(tree):
            if path == rule.path or path.startswith(rule.path.rstrip("/") + "/"):
                return f"files.{tree}"
    return f"processes.{OPERATIONS.get(operation, operation)}"


def _both(rule: FileRule, modes: str) -> Iterator[str]:
    yield f"audit deny {quoted(rule.path)} {modes},"
    yield f"audit deny {quoted(rule.path.rstrip('/') + '/')}** {modes},".replace('"**', '**"')


def quoted(path: str) -> str:
    """A path as AppArmor reads it literally."""
    literal = GLOB.sub(r"\\\1", path)
    return f'"{literal}"' if SPECIAL.search(literal) else literal
