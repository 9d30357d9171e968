"""How much of a request fits into the quotas of a chain of projects. Pure.

Owns: the arithmetic. Does not own: rows and locks (:mod:`services.auth.store`).

A sandbox is charged to its project and to every project above it, so it has to fit
everywhere. Of a request the first that fit are admitted, in order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from schemas.iam import Amounts, Limits
from schemas.sandbox import SandboxSpec
from shared.errors import QuotaExceeded

MILLI = 1000
RATE = "creations_per_s"
"""The limit that time alone gives back."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one sandbox is charged: thousandths of a core, MiB."""

    millicores: int
    memory_mb: int


@dataclass(slots=True)
class Account:
    """Limits and use of one project. ``tokens`` are creations that the rate allows at
    ``tokens_at`` (``None``: the bucket is full)."""

    project: str
    sandboxes_max: int | None = None
    millicores_max: int | None = None
    memory_mb_max: int | None = None
    rate: float | None = None
    sandboxes: int = 0
    millicores: int = 0
    memory_mb: int = 0
    tokens: float | None = None
    tokens_at: float | None = None
    added: list[int] = field(default_factory=lambda: [0, 0, 0])
    """What this batch added: sandboxes, thousandths of a core, MiB."""

    def refill(self, now: float, *, burst_s: float) -> None:
        """Brings the bucket to ``now``. A clock that went back refills nothing."""
        if self.rate is None:
            self.tokens = self.tokens_at = None
            return
        most = max(1.0, self.rate * burst_s)
        if self.tokens is None or self.tokens_at is None:
            self.tokens = most
        else:
            self.tokens = min(most, self.tokens + max(0.0, now - self.tokens_at) * self.rate)
        self.tokens_at = max(now, self.tokens_at or now)

    def room(self, cost: Cost) -> tuple[int | None, str]:
        """How many of ``cost`` still fit (``None``: any number), and the limit that
        says so."""
        rooms = [
            (_share(self.sandboxes_max, self.sandboxes, 1), "sandboxes"),
            (_share(self.millicores_max, self.millicores, cost.millicores), "cores"),
            (_share(self.memory_mb_max, self.memory_mb, cost.memory_mb), "memory_mb"),
            (None if self.tokens is None else int(self.tokens), RATE),
        ]
        return min(rooms, key=lambda r: math.inf if r[0] is None else r[0])

    def take(self, cost: Cost, count: int) -> None:
        """Charges ``count`` sandboxes."""
        amounts = (count, cost.millicores * count, cost.memory_mb * count)
        self.sandboxes += amounts[0]
        self.millicores += amounts[1]
        self.memory_mb += amounts[2]
        self.added = [a + b for a, b in zip(self.added, amounts, strict=True)]
        if self.tokens is not None:
            self.tokens -= count

    def full(self, limit: str) -> QuotaExceeded:
        """The error of a project whose ``limit`` is reached."""
        most, used = {
            "sandboxes": (self.sandboxes_max, self.sandboxes),
            "cores": ((self.millicores_max or 0) / MILLI, self.millicores / MILLI),
            "memory_mb": (self.memory_mb_max, self.memory_mb),
            RATE: (self.rate, None),
        }[limit]
        text = f"{used:g} of {most:g} in use" if used is not None else f"{most:g} allowed"
        wait = (1 - (self.tokens or 0.0)) / self.rate if used is None and self.rate else None
        return QuotaExceeded(
            f"project {self.project} is full: {limit}, {text}",
            field=f"quota.{limit}",
            retry_after_s=wait,
            details={"project": self.project, "limit": most, "used": used},
        )


def _share(most: int | None, used: int, each: int) -> int | None:
    if most is None or each == 0:
        return None
    return max(0, most - used) // each


def admit(
    accounts: Mapping[str, Account], path: Sequence[str], cost: Cost, count: int
) -> tuple[int, QuotaExceeded | None]:
    """Charges as many of ``count`` equal sandboxes as fit into every project of
    ``path``; returns how many, and why not more."""
    fits, reason = count, None
    for project in reversed(path):  # of equally full projects the nearest is named
        room, limit = accounts[project].room(cost)
        if room is not None and room < fits:
            fits, reason = room, (accounts[project], limit)
    if fits:
        for project in path:
            accounts[project].take(cost, fits)
    return fits, reason[0].full(reason[1]) if reason else None


def give_back(accounts: Mapping[str, Account], path: Sequence[str], cost: Cost, count: int) -> None:
    """Undoes the charge of ``count`` equal sandboxes within the same batch."""
    for project in path:
        accounts[project].take(cost, -count)


def cost_of(spec: SandboxSpec, *, default_cores: float, default_memory_mb: int) -> Cost:
    """What ``spec`` is charged: its request, else its limit, else the default; cores
    rounded up to thousandths."""
    cores = spec.cpu_cores_request or spec.cpu_cores_limit or default_cores
    memory_mb = spec.memory_request_mb or spec.memory_limit_mb or default_memory_mb
    return Cost(math.ceil(round(cores * MILLI, 6)), memory_mb)


def limits_of(row: Account) -> Limits:
    """A project's own limits as the API shows them."""
    return Limits(
        sandboxes=row.sandboxes_max,
        cores=None if row.millicores_max is None else row.millicores_max / MILLI,
        memory_mb=row.memory_mb_max,
        creations_per_s=row.rate,
    )


def used_of(row: Account) -> Amounts:
    """A project's use as the API shows it."""
    return Amounts(sandboxes=row.sandboxes, cores=row.millicores / MILLI, memory_mb=row.memory_mb)
