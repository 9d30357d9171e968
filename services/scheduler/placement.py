"""Which node gets a sandbox: filter, then the best of k random nodes. Pure.

Owns: eligibility, the load score, spreading of a batch, the typed reason where no
node will do. Does not own: the view's freshness (``fleet``) or the reservation
(``nodes``), which checks again under a lock.

Every placement is counted on its view at once, so that a burst between two
heartbeats does not see the same empty node two hundred times.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from schemas.base import WireError
from schemas.node import BackendStatus, Resources
from schemas.sandbox import SandboxSpec
from shared.policies import is_policy_part

PRESSURE_WEIGHT = 0.5
"""How much measured pressure (0…1) adds to a node's load, in committed shares."""
MAX_REASONS = 6
"""Reasons of one error, the most frequent ones."""


@dataclass(slots=True)
class NodeView:
    """A node as placement sees it: amounts in cores, MiB, sandboxes. ``pressure``
    is the worst measured share of stalled or used time, 0…1. ``away``: why it takes
    nothing at present ("lost", "over cpu pressure 0.98"), empty where it does."""

    id: str
    pool: str
    capacity: Resources
    backends: Mapping[str, BackendStatus]
    cores: float = 0.0
    memory_mb: int = 0
    sandboxes: int = 0
    pressure: float = 0.0
    away: str = ""

    @property
    def ready(self) -> bool:
        """Whether it takes sandboxes now."""
        return not self.away

    def fits(self, cores: float, memory_mb: int) -> bool:
        """Whether another sandbox of this size can be committed."""
        c = self.capacity
        return (
            self.sandboxes < c.sandboxes
            and self.memory_mb + memory_mb <= c.memory_mb
            and self.cores + cores <= c.cores + 1e-9
        )

    def add(self, cores: float, memory_mb: int, sandboxes: int = 1) -> None:
        """Counts a placement (or, negative, a release)."""
        self.cores += cores
        self.memory_mb += memory_mb
        self.sandboxes += sandboxes

    def load(self) -> float:
        """The largest committed share, plus measured pressure."""
        c = self.capacity
        share = max(
            self.sandboxes / c.sandboxes if c.sandboxes else 1.0,
            self.memory_mb / c.memory_mb if c.memory_mb else 1.0,
            self.cores / c.cores if c.cores else 1.0,
        )
        return share + PRESSURE_WEIGHT * self.pressure


@dataclass(frozen=True, slots=True)
class Need:
    """What a sandbox asks of a node. ``features`` must be reported as supported,
    ``not_without`` must not be reported as unsupported. ``node``: the only one that will
    do, because what it is made of is there."""

    backend: str
    features: frozenset[str] = frozenset()
    not_without: frozenset[str] = frozenset()
    exclude: frozenset[str] = frozenset()
    node: str | None = None


@dataclass(slots=True)
class Ask:
    """One sandbox to be placed. Amounts in cores and MiB."""

    uid: str
    need: Need
    cores: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why no node took a sandbox. ``hope``: one may later, as its amounts change or it
    comes back; ``refused``: every node that could run it has said no itself."""

    error: WireError
    hope: bool = False
    refused: bool = False


@dataclass(slots=True)
class Placed:
    """Nodes by uid, and the failure of each that found none."""

    nodes: dict[str, str] = field(default_factory=dict)
    failed: dict[str, Failure] = field(default_factory=dict)


def need_of(spec: SandboxSpec, exclude: Iterable[str] = ()) -> Need:
    """What ``spec`` asks of a node: a limit without its enforcer is not a limit."""
    # parts of a policy are the edge's to enforce or refuse, whatever its backend is called
    features = {name for name in spec.require if not is_policy_part(name)}
    if spec.disk_limit_mb is not None:
        features.add("disk_limit")
    if spec.on_timeout == "pause" and spec.ttl_running_stop is not None:
        features.add("pause")
    wanted = {
        "cpu_limit": spec.cpu_cores_limit,
        "memory_limit": spec.memory_limit_mb,
        "pids_limit": spec.pids_limit,
    }
    present = frozenset(name for name, value in wanted.items() if value is not None)
    return Need(spec.backend, frozenset(features), present, frozenset(exclude), spec.node)


def amounts(
    spec: SandboxSpec, *, default_cores: float, default_memory_mb: int
) -> tuple[float, int]:
    """Cores and MiB to reserve, as the edge will count them: the limit, else the
    request, else the default."""
    cores = spec.cpu_cores_limit or spec.cpu_cores_request or default_cores
    return cores, spec.memory_limit_mb or spec.memory_request_mb or default_memory_mb


def why_not(need: Need, node: NodeView) -> str | None:
    """Why a node can never run this, ``None`` where it can."""
    if need.node is not None and need.node != node.id:
        return f"its source is on {need.node}"
    status = node.backends.get(need.backend)
    if status is None:
        return f"no backend {need.backend}"
    if not status.supported:
        return status.reason or f"{need.backend} is not supported"
    for name in sorted(need.features):
        report = status.features.get(name)
        if report is None or not report.supported:
            return f"{name}: {(report.reason if report else '') or 'not supported'}"
    for name in sorted(need.not_without):
        report = status.features.get(name)
        if report is not None and not report.supported:
            return f"{name}: {report.reason or 'not supported'}"
    return None


def place_batch(
    asks: Sequence[Ask],
    nodes: Sequence[NodeView],
    rng: random.Random,
    *,
    choices: int = 2,
    cloud_share: float = 0.0,
    retry_after_s: float = 5.0,
) -> Placed:
    """Places what fits, counting each placement on ``nodes``. ``cloud_share`` is the
    portion tried first in the cloud; the other pool is the fall-back of both."""
    out = Placed()
    failures: dict[tuple[Need, float, int], Failure] = {}
    pools: dict[Need, tuple[list[NodeView], list[NodeView]]] = {}
    for ask in asks:
        shape = (ask.need, ask.cores, ask.memory_mb)
        if shape in failures:  # nothing is given back on the way: the next fails, too
            out.failed[ask.uid] = failures[shape]
            continue
        pair = pools.get(ask.need)
        if pair is None:
            pair = pools[ask.need] = _eligible(ask.need, nodes)
        home, cloud = pair
        if cloud_share and cloud and rng.random() < cloud_share:
            home, cloud = cloud, home
        node = _best(ask, home, rng, choices) or _best(ask, cloud, rng, choices)
        if node is None:
            failure = shortage(ask, nodes, retry_after_s=retry_after_s)
            out.failed[ask.uid] = failures[shape] = failure
        else:
            node.add(ask.cores, ask.memory_mb)
            out.nodes[ask.uid] = node.id
    return out


def _eligible(need: Need, nodes: Sequence[NodeView]) -> tuple[list[NodeView], list[NodeView]]:
    good = [n for n in nodes if n.ready and n.id not in need.exclude and not why_not(need, n)]
    return [n for n in good if n.pool != "cloud"], [n for n in good if n.pool == "cloud"]


def _best(ask: Ask, nodes: list[NodeView], rng: random.Random, choices: int) -> NodeView | None:
    count = len(nodes)
    if not count:
        return None
    best: NodeView | None = None
    best_load = 0.0
    for _ in range(choices):  # with replacement: the gap to sampling without is nil
        node = nodes[int(rng.random() * count)]
        if node is best or not node.fits(ask.cores, ask.memory_mb):
            continue
        load = node.load()
        if best is None or load < best_load or (load == best_load and rng.random() < 0.5):
            best, best_load = node, load
    if best is not None:
        return best
    room = [n for n in nodes if n.fits(ask.cores, ask.memory_mb)]
    if not room:
        return None
    return min(rng.sample(room, min(choices, len(room))), key=NodeView.load)


def shortage(ask: Ask, nodes: Sequence[NodeView], *, retry_after_s: float) -> Failure:
    """Why no node took it: nothing supports it, or everything is full or away."""
    reasons = [why_not(ask.need, n) for n in nodes]
    if nodes and all(reasons):
        text = "; ".join(sorted({r for r in reasons if r})[:MAX_REASONS])
        error = WireError(
            code="unsupported",
            message=f"no node can run backend {ask.need.backend} as asked: {text}",
            field=_field(ask.need.features & _named(reasons)),
            cause="invalid",
        )
        return Failure(error)
    able = [n for n, r in zip(nodes, reasons, strict=True) if r is None]
    hope = not nodes or any(_large_enough(ask, n) for n in able)
    filters = Counter(r or _obstacle(ask, n) for n, r in zip(nodes, reasons, strict=True))
    error = WireError(
        code="capacity_exhausted",
        message=_told(len(nodes), filters),
        cause="capacity",
        is_infra=True,
        retryable=hope,
        retry_after_s=retry_after_s if hope else None,
        details={"nodes": len(nodes), "filters": dict(filters.most_common(MAX_REASONS))},
    )
    return Failure(error, hope, bool(able) and all(n.id in ask.need.exclude for n in able))


def _obstacle(ask: Ask, node: NodeView) -> str:
    """What keeps a node that could run it from taking it now; the same words for the
    same limit on every node."""
    c = node.capacity
    if not _large_enough(ask, node):
        return f"not large enough for {ask.cores:g} cores and {ask.memory_mb} MiB"
    if node.away:
        return node.away
    if node.id in ask.need.exclude:
        return "refused it"
    if node.sandboxes >= c.sandboxes:
        return "out of sandboxes"
    if node.memory_mb + ask.memory_mb > c.memory_mb:
        return f"without {ask.memory_mb} MiB to give"
    return f"without {ask.cores:g} cores to give"


def _told(total: int, filters: Counter[str]) -> str:
    """``2 nodes: 1 lost, 1 over cpu pressure 0.98``."""
    if not total:
        return "no node has joined"
    parts = [f"{n} {reason}" for reason, n in sorted(filters.items(), key=lambda i: (-i[1], i[0]))]
    return f"{total} node{'s' * (total > 1)}: {', '.join(parts[:MAX_REASONS])}"


def _named(reasons: Iterable[str | None]) -> set[str]:
    return {r.partition(":")[0] for r in reasons if r}


def _field(missing: frozenset[str] | set[str]) -> str:
    if "disk_limit" in missing:
        return "disk_limit_mb"
    return "require" if missing else "backend"


def _large_enough(ask: Ask, node: NodeView) -> bool:
    c = node.capacity
    return ask.cores <= c.cores and ask.memory_mb <= c.memory_mb and c.sandboxes > 0


Amounts = dict[str, tuple[float, int, int]]
"""Per node: cores, MiB, sandboxes."""


class Overlay:
    """Own placements that the last snapshot of the nodes may not hold yet.

    A batch is *open* from its decision to its end in the database; a snapshot begun
    after that end contains it. Times are any monotonic seconds.
    """

    def __init__(self) -> None:
        self._open: dict[int, Amounts] = {}
        self._ended: dict[int, float] = {}
        self._next = 0

    def begin(self, amounts: Amounts) -> int:
        """Remembers a batch's placements; returns its key."""
        self._next += 1
        self._open[self._next] = amounts
        return self._next

    def commit(self, key: int, at: float) -> None:
        """The batch is in the database since ``at``."""
        self._ended[key] = at

    def abort(self, key: int) -> None:
        """The batch came to nothing."""
        self._open.pop(key, None)

    def snapshot(self, begun_at: float) -> Amounts:
        """What to add to a snapshot whose reading began at ``begun_at``."""
        for key in [k for k, at in self._ended.items() if at < begun_at]:
            del self._ended[key]
            self._open.pop(key, None)
        total: Amounts = {}
        for amounts in self._open.values():
            for node, (cores, memory_mb, count) in amounts.items():
                c, m, n = total.get(node, (0.0, 0, 0))
                total[node] = (c + cores, m + memory_mb, n + count)
        return total
