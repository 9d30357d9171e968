"""Whether one more sandbox may start on this node. Pure.

Owns: the order and the wording of refusals. Does not own: measuring (probe),
placement (the scheduler reserves first; this is the node's own second look, by what
it has committed and by what the machine says now).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shared.errors import CapacityExhausted

RETRY_AFTER_S = 1.0
_EPSILON = 1e-6  # sums of fractional cores must not refuse the last one by rounding


@dataclass(frozen=True, slots=True)
class Amount:
    """Cores, MiB of memory and disk, sandboxes: asked for, committed, or what may be
    committed. Sandboxes without a limit of disk commit none."""

    cores: float = 0.0
    memory_mb: int = 0
    sandboxes: int = 0
    disk_mb: int = 0

    def plus(self, other: Amount) -> Amount:
        """The sum."""
        return Amount(
            self.cores + other.cores,
            self.memory_mb + other.memory_mb,
            self.sandboxes + other.sandboxes,
            self.disk_mb + other.disk_mb,
        )

    def minus(self, other: Amount) -> Amount:
        """The difference; never below nothing."""
        return Amount(
            max(0.0, self.cores - other.cores),
            max(0, self.memory_mb - other.memory_mb),
            max(0, self.sandboxes - other.sandboxes),
            max(0, self.disk_mb - other.disk_mb),
        )


@dataclass(frozen=True, slots=True)
class Limits:
    """``capacity`` includes overcommit. Floors: MiB and pids that stay free.
    ``pressure``: highest share of stalled time, by resource."""

    capacity: Amount
    memory_floor_mb: int = 0
    disk_floor_mb: int = 0
    pids_floor: int = 0
    pressure: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """The machine now: MiB, pids, shares of stalled time, cores in use."""

    memory_available_mb: int
    disk_free_mb: int
    pids_free: int
    pressure: Mapping[str, float] = field(default_factory=dict)
    memory_used_mb: int = 0
    cores_used: float = 0.0


def admit(
    demand: Amount, *, committed: Amount, limits: Limits, measured: Measured
) -> CapacityExhausted | None:
    """``None``, or the refusal whose ``field`` names the limit that was reached, and
    whose ``details["limit"]`` says so in words that are the same on every such node."""
    after = committed.plus(demand)
    capacity = limits.capacity
    if after.sandboxes > capacity.sandboxes:
        text = f"{committed.sandboxes} of {capacity.sandboxes} sandboxes"
        return _refusal("sandboxes", text, "out of sandboxes")
    if demand.memory_mb and after.memory_mb > capacity.memory_mb:
        text = f"{demand.memory_mb} MiB over {committed.memory_mb} of {capacity.memory_mb} MiB"
        return _refusal("memory_limit_mb", text, "out of memory_limit_mb")
    if demand.disk_mb and after.disk_mb > capacity.disk_mb:
        text = f"{demand.disk_mb} MiB over {committed.disk_mb} of {capacity.disk_mb} MiB of disk"
        return _refusal("disk_limit_mb", text, "out of disk_limit_mb")
    if demand.cores and after.cores > capacity.cores + _EPSILON:
        text = f"{demand.cores:g} cores over {committed.cores:g} of {capacity.cores:g}"
        return _refusal("cpu_cores_limit", text, "out of cpu_cores_limit")
    return _by_measure(limits, measured)


def _by_measure(limits: Limits, measured: Measured) -> CapacityExhausted | None:
    floors = (
        ("memory", "MiB of memory", measured.memory_available_mb, limits.memory_floor_mb),
        ("disk", "MiB of disk", measured.disk_free_mb, limits.disk_floor_mb),
        ("pids", "pids", measured.pids_free, limits.pids_floor),
    )
    for name, unit, free, floor in floors:
        if free < floor:
            text = f"{free} {unit} free, {floor} must stay free"
            return _refusal(name, text, f"under {floor} {unit} free")
    for name, ceiling in limits.pressure.items():
        share = measured.pressure.get(name, 0.0)
        if share > ceiling:
            text = f"{name} pressure {share:.2f} over {ceiling:.2f}"
            return _refusal(f"pressure.{name}", text, f"over {name} pressure {ceiling:.2f}")
    return None


def _refusal(field_: str, text: str, limit: str) -> CapacityExhausted:
    return CapacityExhausted(
        f"the node is full: {text}", field=field_, cause="capacity",
        retry_after_s=RETRY_AFTER_S, details={"limit": limit},
    )  # fmt: skip
