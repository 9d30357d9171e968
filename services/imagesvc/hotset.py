"""Which layers, and which parts of them, serve most sandboxes. Pure.

Owns: the choice. Does not own: who counted. An environment is served where all its layers
are: one that is missing makes the others useless to it.

The smallest set for a share is a knapsack with shared items; greedy by sandboxes per byte
that is not there yet, and then without what turned out not to be needed, is within a few
per cent of it on environments that share their bases, and explains itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Environment:
    """So many sandboxes were started from these layers."""

    layers: tuple[str, ...]
    sandboxes: int


@dataclass(frozen=True, slots=True)
class Choice:
    """``layers``: digests, in the order in which they are worth fetching. ``sandboxes`` of
    ``total`` are served."""

    layers: tuple[str, ...]
    sandboxes: int
    total: int

    @property
    def share(self) -> float:
        return self.sandboxes / self.total if self.total else 0.0


def choose(
    environments: Sequence[Environment], cost_bytes: Mapping[str, int], share: float
) -> Choice:
    """Layers that serve at least ``share`` of all sandboxes. ``cost_bytes``: what a layer
    takes; environments with a layer that has none are not served (it is gone)."""
    total = sum(one.sandboxes for one in environments)
    wanted = share * total
    left = sorted(
        (one for one in environments if all(digest in cost_bytes for digest in one.layers)),
        key=lambda one: one.layers,
    )
    chosen: dict[str, None] = {}
    picked: list[Environment] = []
    served = 0
    while left and served < wanted:
        best = max(left, key=lambda one: _worth(one, chosen, cost_bytes))
        chosen.update(dict.fromkeys(best.layers))
        covered = [one for one in left if all(digest in chosen for digest in one.layers)]
        picked += covered
        served += sum(one.sandboxes for one in covered)
        left = [one for one in left if one not in covered]
    return _pruned(picked, chosen, wanted, total, cost_bytes)


def _worth(one: Environment, chosen: Mapping[str, None], cost_bytes: Mapping[str, int]) -> float:
    missing = sum(cost_bytes[digest] for digest in set(one.layers) if digest not in chosen)
    return one.sandboxes / missing if missing else float("inf")


def _pruned(
    picked: list[Environment], chosen: Mapping[str, None], wanted: float, total: int,
    cost_bytes: Mapping[str, int],
) -> Choice:  # fmt: skip
    """Without environments whose own layers cost most for what the share can spare."""
    served = sum(one.sandboxes for one in picked)
    kept = list(picked)
    for one in sorted(picked, key=lambda one: _own(one, picked, cost_bytes), reverse=True):
        if served - one.sandboxes >= wanted and _own(one, kept, cost_bytes):
            kept.remove(one)
            served -= one.sandboxes
    needed = {digest for one in kept for digest in one.layers}
    return Choice(tuple(digest for digest in chosen if digest in needed), served, total)


def _own(one: Environment, others: Sequence[Environment], cost_bytes: Mapping[str, int]) -> int:
    """Bytes of layers that no other of ``others`` has."""
    shared = {digest for other in others if other is not one for digest in other.layers}
    return sum(cost_bytes[digest] for digest in set(one.layers) - shared)
