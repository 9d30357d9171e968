"""Decisions about one sandbox. Pure: no clock, no I/O.

Owns: what a redelivered or late command means, when time is up, what a failed start
is called, whether a spec can be honoured. Does not own: doing it (actor, supervisor).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schemas.sandbox import ResolvedSpec, SandboxSpec, StartItem
from services.edge.admission import Amount
from services.edge.drivers.base import TRUST_PATH, BackendReport, Layer, Secret, StartSpec
from services.edge.policy import plan
from shared import lifecycle, policies
from shared.errors import (
    CapacityExhausted,
    DsecError,
    InvalidRequest,
    NotFound,
    PolicyDenied,
    Unavailable,
    Unsupported,
)

QUIET = frozenset({"set_timeout", "tighten"})
"""Operations that leave a sandbox running or paused, as it is."""
DEFAULT_USER = "root"
DEFAULT_WORKDIR = "/"
TRUSTING = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
)  # fmt: skip
"""Variables by which programs find whom to trust."""


def judge_start(
    generation: int, *, present: int | None, buried: int | None
) -> Literal["start", "adopt", "repeat", "bury"]:
    """What a start of ``generation`` means where the sandbox is present at a
    generation, or its tombstone was made at one.

    ``start`` it; ``adopt`` the one that lives here under the newer command (there
    are never two for a uid); ``repeat`` what was last observed; ``bury``: it had
    ended (or was stopped before it came), say so again.
    """
    if present is not None:
        return "adopt" if generation > present else "repeat"
    if buried is not None and generation <= buried:
        return "bury"
    return "start"


def judge_op(
    verb: str, generation: int, *, present: int, asked_at: float = 0.0, renewed_at: float = 0.0
) -> Literal["do", "repeat"]:
    """Whether an operation is new. An older one is a late delivery. A stop of the
    present command is always obeyed: stopping twice does no harm. Time limits have an order
    of their own, when they were asked for: the later ones count, whichever comes first."""
    if verb == "set_timeout":
        return "do" if asked_at >= renewed_at else "repeat"
    if generation < present:
        return "repeat"
    if generation == present and verb in ("pause", "resume"):
        return "repeat"
    return "do"


@dataclass(frozen=True, slots=True)
class Times:
    """Limits of a sandbox's life in seconds, ``None`` = none. ``deadline_s`` counts
    from its start, ``idle_s`` from its last activity while it runs. ``scoring_s``: how long
    it stands for a verifier after that."""

    idle_s: float | None = None
    deadline_s: float | None = None
    scoring_s: float = 0.0

    def renewed(self, idle_s: float | None, deadline_s: float | None, *, age_s: float) -> Times:
        """With new values that count from now, ``age_s`` after the start; ``None`` leaves
        one as it is, 0 removes it."""
        if deadline_s:
            deadline_s += max(0.0, age_s)
        return Times(_new(self.idle_s, idle_s), _new(self.deadline_s, deadline_s), self.scoring_s)


def _new(old: float | None, new: float | None) -> float | None:
    return old if new is None else (new or None)


@dataclass(frozen=True, slots=True)
class Age:
    """A sandbox in time: seconds since its start and since its last activity, whether it
    ``runs`` (or stands still), for how long a verifier's lease is still held, and, once it
    stands for verifiers alone, what ended its work (``scoring``) how long ago."""

    age_s: float
    idle_s: float = 0.0
    runs: bool = True
    held_s: float = 0.0
    scoring: tuple[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Due:
    """``cause`` when time is up, and what comes ``then``: its ``end``, or that it stands
    for a verifier alone (``score``). Else look again in ``wait_s`` (``None``: never)."""

    cause: str | None = None
    wait_s: float | None = None
    then: Literal["end", "score"] = "end"


def due(times: Times, at: Age, *, held_max_s: float = 0.0) -> Due:
    """Whether a sandbox's time is up. One that does not run (paused) is not idle, nor is
    one whose verifier holds a lease; its deadline goes on. A lease holds off what follows
    for at most ``held_max_s`` after time was up; the time for scoring counts from then
    too."""
    up = at.scoring or _up(times, at)
    if up is None:
        return Due(None, min(_left(times, at), default=None))
    cause, over_s = up
    held_s = min(at.held_s, held_max_s - over_s)
    if held_s > 0:
        return Due(None, held_s)
    left_s = times.scoring_s - over_s
    if left_s <= 0:
        return Due(cause)
    return Due(None, left_s) if at.scoring else Due(cause, then="score")


def _up(times: Times, at: Age) -> tuple[str, float] | None:
    """The limit that was reached, and how long ago."""
    if times.deadline_s is not None and at.age_s >= times.deadline_s:
        return "deadline", at.age_s - times.deadline_s
    if times.idle_s is not None and at.runs and at.held_s <= 0 and at.idle_s >= times.idle_s:
        return "idle_timeout", 0.0
    return None


def _left(times: Times, at: Age) -> Iterator[float]:
    if times.deadline_s is not None:
        yield times.deadline_s - at.age_s
    if times.idle_s is not None and at.runs:
        yield max(times.idle_s - at.idle_s, at.held_s)


def demand(spec: SandboxSpec) -> Amount:
    """What a sandbox commits of a node: its limits; without a limit, its request."""
    return Amount(
        cores=spec.cpu_cores_limit or spec.cpu_cores_request or 0.0,
        memory_mb=spec.memory_limit_mb or spec.memory_request_mb or 0,
        sandboxes=1,
        disk_mb=_disk_mb(spec) or 0,
    )


def _disk_mb(spec: SandboxSpec) -> int | None:
    if spec.policy is None:
        return spec.disk_limit_mb
    policy = policies.read(spec.policy, spec.network_rules, spec.require)
    return _least(spec.disk_limit_mb, policy.limits.disk_mb)


def check_spec(spec: SandboxSpec, report: BackendReport) -> DsecError | None:
    """Why this backend can't honour ``spec`` as it is asked for, if it can't."""
    if not report.supported:
        text = f"backend {spec.backend} does not work on this node: {report.reason}"
        return Unavailable(text, field="backend")
    try:
        policy = policy_of(spec)
        plan.compile_policy(policy, report.features)
    except DsecError as exc:
        return exc
    for name in spec.require:
        if policies.is_policy_part(name):
            continue
        feature = report.features.get(name)
        if feature is None or not feature.supported:
            why = feature.reason if feature else "unknown to this backend"
            return PolicyDenied(f"{name} can't be enforced on this node: {why}", field="require")
    disk = report.features.get("disk_limit")
    if spec.disk_limit_mb is not None and not (disk and disk.supported):
        why = disk.reason if disk else "unknown to this backend"
        return Unsupported(f"disks can't be limited on this node: {why}", field="disk_limit_mb")
    carried = report.features.get("routes")
    if spec.routes and not (carried and carried.supported):
        return Unsupported(f"backend {spec.backend} has no routes", field="routes")
    carried = report.features.get("secrets")
    if spec.secrets and not (carried and carried.supported):
        why = carried.reason if carried else "it has no way out"
        text = f"backend {spec.backend} can't put secrets in: {why}"
        return Unsupported(text, field="secrets")
    pause = report.features.get("pause")
    if spec.on_timeout == "pause" and not (pause and pause.supported):
        why = pause.reason if pause else "it stops only"
        return Unsupported(f"backend {spec.backend} can't pause: {why}", field="on_timeout")
    clear = report.features.get("clear")
    if spec.scoring_grace_s and not (clear and clear.supported):
        text = f"backend {spec.backend} cannot end an agent's processes alone"
        return Unsupported(text, field="scoring_grace_s")
    return None


def check_routes(spec: SandboxSpec, known: Collection[str]) -> DsecError | None:
    """Why this node can't give the routes of ``spec``, if it can't."""
    unknown = sorted(set(spec.routes) - set(known))
    if unknown:
        return Unsupported(f"this node has no route {', '.join(unknown)}", field="routes")
    return None


def policy_of(spec: SandboxSpec) -> policies.Policy:
    """What is to be in force. Raises ``InvalidRequest`` or ``Unsupported``."""
    read = policies.read(spec.policy, spec.network_rules, spec.require)
    policy = policies.tightened(read, spec.tighten)
    return replace(policy, network=()) if spec.offline else policy


def times(spec: SandboxSpec) -> Times:
    """The limits of its life; a policy's wall time is a deadline."""
    policy = policy_of(spec)
    ends = [s for s in (spec.deadline_s, policy.limits.wall_time_s) if s is not None]
    return Times(spec.ttl_running_stop, min(ends, default=None), spec.scoring_grace_s)


def _least(*limits: int | None) -> int | None:
    return min((n for n in limits if n is not None), default=None)


def failed_start(exc: DsecError) -> tuple[Literal["refused", "failed"], str]:
    """How a start that raised is observed, and its cause. ``refused`` where another
    node may do better: then nothing is left here, says the driver port."""
    if isinstance(exc, CapacityExhausted | Unavailable):
        return "refused", exc.cause or "capacity"
    if exc.cause in lifecycle.CAUSES:
        return "failed", exc.cause
    if isinstance(exc, InvalidRequest | Unsupported | PolicyDenied):
        return "failed", "invalid"
    if isinstance(exc, NotFound):
        return "failed", "image"
    return "failed", "runtime"


def start_spec(item: StartItem, resolved: ResolvedSpec, layers: list[Layer]) -> StartSpec:
    """The driver's form of a start: the spec over the defaults of its image."""
    spec, image = resolved.spec, resolved.image
    policy = policy_of(spec)
    limits = policy.limits
    secrets = _secrets(spec)
    env: Mapping[str, str] = {**image.env, **_shown(spec, secrets), **spec.env}
    return StartSpec(
        uid=item.uid,
        project=item.project,
        layers=layers,
        cpu_cores=spec.cpu_cores_limit,
        memory_mb=spec.memory_limit_mb,
        disk_mb=_least(spec.disk_limit_mb, limits.disk_mb),
        inodes=limits.inodes,
        pids=_least(spec.pids_limit, limits.pids),
        env=env,
        workdir=spec.workdir or image.workdir or DEFAULT_WORKDIR,
        user=spec.init_user or image.user or DEFAULT_USER,
        policy=policy,
        qos=spec.qos,
        hostname=item.uid,
        options=spec.options,
        secrets=secrets,
    )


def _secrets(spec: SandboxSpec) -> list[Secret]:
    return [
        Secret(name, tuple(b.hosts), f"dsec-secret-{name}", b.header, b.format)
        for name, b in spec.secrets.items()
    ]


def _shown(spec: SandboxSpec, secrets: Sequence[Secret]) -> dict[str, str]:
    """What of its secrets a sandbox sees."""
    if not secrets:
        return {}
    shown = {b.env: s.placeholder for b, s in zip(spec.secrets.values(), secrets, strict=True)
             if b.env}  # fmt: skip
    return dict.fromkeys(TRUSTING, TRUST_PATH) | shown
