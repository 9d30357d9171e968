"""A policy made stricter by data. Pure.

Owns: what a tightening does to each kind of rule. Does not own: who asks for it. It only
takes away: whatever the policy becomes later, the tightening comes over it, so that what
it denied no other rule opens again, however specific.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from schemas.sandbox import SandboxSpec, Tightening
from shared.errors import Unsupported
from shared.policies.model import Policy
from shared.policies.network import ALL_PORTS, WEB_PORTS, NetworkRule, parse
from shared.policies.reading import denied_calls

EVERYTHING = Tightening(network=["*"])
"""No way out."""


def merged(old: Tightening | None, new: Tightening) -> Tightening:
    """Both."""
    if old is None:
        return new
    return Tightening(
        network=list(dict.fromkeys([*old.network, *new.network])),
        deny=list(dict.fromkeys([*old.deny, *new.deny])),
    )


def carried(spec: SandboxSpec, source: SandboxSpec) -> SandboxSpec:
    """``spec`` under the policy that ``source`` is under now, and under its own tightening
    too: what continues another sandbox is not let out of what that one was held to."""
    both = spec.tighten if source.tighten is None else merged(spec.tighten, source.tighten)
    return msgspec.structs.replace(
        spec, network_rules=source.network_rules, policy=source.policy,
        offline=source.offline, tighten=both,
    )  # fmt: skip


def tightened(policy: Policy, wanted: Tightening | None) -> Policy:
    """The policy under ``wanted``. Raises ``InvalidRequest`` or ``Unsupported`` naming
    the field."""
    if wanted is None:
        return policy
    deny, ioctls, execs = denied_calls([("tighten.deny", wanted.deny)])
    if execs:
        raise Unsupported("paths of a running sandbox stay as they are", field="tighten.deny")
    return replace(
        policy, network=_network(policy.network, wanted.network),
        deny=tuple(dict.fromkeys([*policy.deny, *deny])),
        ioctls=tuple(dict.fromkeys([*policy.ioctls, *ioctls])),
    )  # fmt: skip


def _network(rules: tuple[NetworkRule, ...], texts: list[str]) -> tuple[NetworkRule, ...]:
    closing = [
        replace(rule, ports=(ALL_PORTS,)) if rule.ports == WEB_PORTS else rule
        for text in texts for rule in parse(text, False, field="tighten.network")
    ]  # fmt: skip
    if any(_is_everything(rule) for rule in closing):
        return ()
    below = [
        replace(rule, allow=False, text=c.text, ports=c.ports, protocol=c.protocol)
        for c in closing for rule in rules if rule.allow and _holds(c, rule)
    ]  # fmt: skip
    return tuple(dict.fromkeys([*rules, *closing, *below]))


def _is_everything(rule: NetworkRule) -> bool:
    every = rule.block is not None and rule.block.prefixlen == 0
    return every and ALL_PORTS in rule.ports and rule.protocol != "udp"


def _holds(outer: NetworkRule, inner: NetworkRule) -> bool:
    """Whether all that ``inner`` is about is below ``outer``'s target."""
    if outer.block is not None and inner.block is not None:
        same = outer.block.version == inner.block.version
        return same and inner.block.subnet_of(outer.block)  # type: ignore[arg-type]
    if outer.kind != inner.kind:
        return False
    return inner.name == outer.name or (
        outer.name.startswith("*.") and inner.name.endswith(outer.name[1:])
    )
