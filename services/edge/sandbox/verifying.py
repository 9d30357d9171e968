"""Who may use a sandbox beside its agent, or after it: verifiers. Pure: times are given.

Owns: a verifier's lease (taken, renewed, given back, run out), what of a sandbox's time
outlives the edge, who is let in. Does not own: when time is up
(:mod:`services.edge.sandbox.rules`), keeping it (:mod:`services.edge.sandbox.timekeeping`).

Times are the edge's wall clock: they go on while a sandbox is paused, and over a restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared import lifecycle
from shared.errors import Conflict, DsecError, SandboxDied


@dataclass(frozen=True, slots=True)
class Lease:
    """``holder`` has it until ``until``, by renewals no longer than ``ends``. ``alone``:
    nobody else is let in meanwhile."""

    holder: str
    until: float
    ends: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Scoring:
    """Time was up at ``at``, by the limit ``cause``: the agent's processes are gone, and
    the sandbox stands for verifiers alone."""

    cause: str
    at: float

    def death(self) -> SandboxDied:
        """What everyone else hears: to them it is over."""
        text = f"the sandbox ended: {self.cause}; it stands for its verifier alone"
        return SandboxDied(text, cause=self.cause, is_infra=lifecycle.is_infra(self.cause))


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a sandbox's time is kept beside its limits. ``asked_at``: when the limits in
    force were asked for."""

    scoring: Scoring | None = None
    lease: Lease | None = None
    asked_at: float = 0.0

    def held_s(self, now: float) -> float:
        """How long the lease is held without a renewal."""
        return max(0.0, self.lease.until - now) if self.lease else 0.0


def taken(
    kept: Kept, holder: str, lease_s: float, *, now: float, max_s: float, alone: bool = False
) -> Kept:
    """With the lease taken or renewed for ``lease_s`` seconds. Raises ``Conflict`` while
    somebody else has it (``retry_after_s``: until it ends, unless it is renewed), and where
    ``holder`` had it for its ``max_s``."""
    lease = kept.lease
    if lease is not None and lease.holder != holder:
        if lease.until > now:
            text = "another verifier holds the sandbox"
            raise Conflict(text, field="lease", retry_after_s=kept.held_s(now))
        lease = None
    ends = now + max_s if lease is None else lease.ends
    if now >= ends:
        raise Conflict(f"a lease is held for at most {max_s:g} s", field="lease")
    alone = alone or (lease is not None and lease.alone)
    return replace(kept, lease=Lease(holder, min(now + lease_s, ends), ends, alone))


def released(kept: Kept, holder: str) -> Kept:
    """Without the lease, where ``holder`` has it."""
    if kept.lease is None or kept.lease.holder != holder:
        return kept
    return replace(kept, lease=None)


def refusal(kept: Kept, holder: str, *, cleared: bool, now: float) -> DsecError | None:
    """Why an operation is not let in, if it is not. ``holder``: whose lease it names.
    ``cleared``: whether the agent's processes are gone already."""
    lease = kept.lease if kept.held_s(now) > 0 else None
    mine = lease is not None and lease.holder == holder
    if kept.scoring is not None and not (mine and cleared):
        return kept.scoring.death()
    if lease is not None and lease.alone and not mine:
        text = "a verifier has the sandbox for itself"
        return Conflict(text, field="lease", retry_after_s=kept.held_s(now))
    return None
