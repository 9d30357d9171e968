"""The compiler: a policy and what this node can do → what is to be done. Pure.

Owns: which mechanism enforces which rule, and the refusal where none does. Does not own:
what the mechanisms are made of (:mod:`.reach`, :mod:`.seccomp`, the drivers).

What is asked and has no mechanism is refused, whether or not the document requires it:
nothing starts with less protection than asked. A rule that *allows* what cannot be
reached takes no protection away: it is reported as such, and refused only where
``network`` is required.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from schemas.policy import Limits
from services.edge.drivers.base import Feature
from services.edge.policy import seccomp
from shared.errors import PolicyDenied
from shared.policies import Policy
from shared.policies.model import TREES, Tree
from shared.policies.network import NetworkRule

EGRESS, MOUNTS, SECCOMP, RLIMITS = "network_allow", "policy_files", "policy_calls", "policy_limits"
SIGNALS = "policy_signals"
"""Features of a backend that enforce parts of a policy."""
SENSORS = "sensors"
"""The feature of one that tells what is done to paths under a policy."""
APPARMOR = "policy_apparmor"
"""The feature of one that puts commands under a profile, on top of the others."""
LSM = "policy_lsm"
"""The feature of one whose kernel protects paths as well."""
PROFILED = (
    "files.", "processes.exec", "processes.mount", "processes.ptrace", "processes.raw_sockets",
    "processes.bpf", "processes.signals",
)  # fmt: skip
"""Beginnings of the rules that a profile enforces as well."""
NO_INTERFACE = "none (no interface)"
DEADLINE = "deadline of the edge"
"""Of a wall time: every backend's sandboxes are stopped by their edge."""
RULES_TOLD_MAX = 64
IOCTLS_MAX = 64
PLANS_KEPT = 64


@dataclass(frozen=True, slots=True)
class Mount:
    """One path of the sandbox and what is laid over it."""

    kind: Tree | str
    path: str
    optional: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """What enforces a policy. ``enforcement``: rule → mechanism. ``opens`` says that the
    sandbox gets a way out at all; ``calls`` that a filter of system calls is needed,
    ``watches`` that its paths are watched: a sandbox without any policy pays for nothing.
    ``confines``: the node confines by AppArmor, and whatever the policy is it has a profile.
    ``hooks``: the kernel's own programs protect its paths as well."""

    policy: Policy
    enforcement: Mapping[str, str]
    mounts: tuple[Mount, ...] = ()
    opens: bool = False
    calls: bool = False
    watches: bool = False
    confines: bool = False
    hooks: bool = False

    @property
    def limits(self) -> Limits:
        return self.policy.limits


def compile_policy(policy: Policy, features: Mapping[str, Feature]) -> Plan:
    """The plan of ``policy`` on a backend with ``features``. Raises ``PolicyDenied`` naming
    the field where a rule has no mechanism."""
    return _compiled(policy, tuple(features.items()))


@lru_cache(PLANS_KEPT)
def _compiled(policy: Policy, offered: tuple[tuple[str, Feature], ...]) -> Plan:
    """Kept: a start compiles twice, and the sandboxes of a job are alike."""
    features = dict(offered)
    enforcement = _network(policy, features)
    opens = policy.reaches_out and _can(features, EGRESS)
    for rule, feature, field in _protections(policy):
        found = features.get(feature)
        if found is None or not found.supported:
            why = found.reason if found else "the backend has no enforcer"
            raise PolicyDenied(f"{rule} can't be enforced on this node: {why}", field=field)
        also = [found.reason or feature]
        if _can(features, APPARMOR) and rule.startswith(PROFILED) and feature != SENSORS:
            also.append(features[APPARMOR].reason)
        if _can(features, LSM) and rule.startswith("files.") and feature == MOUNTS:
            also.append(features[LSM].reason)
        enforcement[rule] = ", ".join(also)
    if policy.limits.wall_time_s is not None:
        enforcement["resources.wall_time_s"] = DEADLINE
    _check_required(policy, enforcement, features)
    if len(policy.ioctls) > IOCTLS_MAX:
        raise PolicyDenied(f"at most {IOCTLS_MAX} ioctls", field="policy.processes.deny")
    return Plan(
        policy=policy, enforcement=enforcement, mounts=tuple(_mounts(policy)), opens=opens,
        calls=seccomp.filters(policy), watches=policy != Policy() and _can(features, SENSORS),
        confines=_can(features, APPARMOR),
        hooks=_can(features, LSM) and any(policy.files(tree) for tree in TREES),
    )  # fmt: skip


def _can(features: Mapping[str, Feature], name: str) -> bool:
    found = features.get(name)
    return found is not None and found.supported


def _network(policy: Policy, features: Mapping[str, Feature]) -> dict[str, str]:
    egress = features.get(EGRESS)
    if not policy.reaches_out:
        return {"network": NO_INTERFACE}
    if egress is None or not egress.supported:
        why = egress.reason if egress else "the backend has no network"
        return {"network": f"{NO_INTERFACE}: allow rules are not reachable: {why}"}
    told = {"network": egress.reason}
    if len(policy.network) <= RULES_TOLD_MAX:
        told |= {f"network.{rule.text}": _how(rule) for rule in policy.network}
    return told


def _how(rule: NetworkRule) -> str:
    if rule.protocol == "udp":
        return "cgroup-BPF" if not rule.allow else "not reachable: only TCP leaves a sandbox"
    if rule.kind == "block":
        return "cgroup-BPF, gate"
    if not rule.allow:
        return "DNS gate, SNI gate"
    checked = all(high == low and low in (80, 443) for low, high in rule.ports)
    names = "SNI or Host at the gate" if checked else "SNI or Host at ports 443 and 80"
    return f"DNS gate, cgroup-BPF, {names}"


def _protections(policy: Policy) -> Iterator[tuple[str, str, str]]:
    """Rule, the feature that enforces it, the field that asked for it."""
    for tree in TREES:
        if policy.files(tree):
            yield f"files.{tree}", MOUNTS, f"policy.files.{tree}"
    if policy.watched:
        yield "files.watched", SENSORS, "policy.files.watched"
    for name in policy.deny:
        enforcer = SIGNALS if name == "signals" else SECCOMP
        yield f"processes.{name}", enforcer, "policy.processes.deny"
    if policy.ioctls:
        yield "processes.ioctl", SECCOMP, "policy.processes.deny"
    if policy.exec_deny:
        yield "processes.exec", MOUNTS, "policy.processes.deny"
    limits = policy.limits
    if limits.pids is not None:
        yield "resources.pids", "pids_limit", "policy.resources.pids"
    for name in ("open_files", "file_mb"):
        if getattr(limits, name) is not None:
            yield f"resources.{name}", RLIMITS, f"policy.resources.{name}"
    for name in ("disk_mb", "inodes"):
        if getattr(limits, name) is not None:
            yield f"resources.{name}", "disk_limit", f"policy.resources.{name}"
    if limits.output_bytes is not None:
        yield "resources.output_bytes", "exec", "policy.resources.output_bytes"


def _check_required(
    policy: Policy, enforcement: dict[str, str], features: Mapping[str, Feature]
) -> None:
    if "network" in policy.require and policy.reaches_out and not _can(features, EGRESS):
        found = features.get(EGRESS)
        why = found.reason if found else "the backend has no network"
        raise PolicyDenied(f"network can't be enforced on this node: {why}", field="policy.require")
    for name in policy.require:
        met = any(rule == name or rule.startswith(f"{name}.") for rule in enforcement)
        if not met:
            raise PolicyDenied(
                f"{name} is required, but the policy has no such rule", field="policy.require"
            )


def _mounts(policy: Policy) -> Iterator[Mount]:
    """In the order in which they are laid: what is hidden comes over what is read-only,
    and what must not be executed keeps the other's protection. First the root: what holds
    a path in its place keeps what was writable, and must come to a root that is not."""
    for tree in TREES:
        for rule in sorted(policy.files(tree), key=lambda rule: rule.path != "/"):
            yield Mount(tree, rule.path, rule.optional)
    for path in policy.exec_deny:
        yield Mount("noexec", path, True)
