"""Messages between edges and the watcher: join, heartbeat, node commands."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Message, Token, UnixTime, Versioned

Pool = Literal["onprem", "cloud"]


class FeatureReport(Message, frozen=True):
    """One capability as probed."""

    supported: bool
    reason: str = ""


class BackendStatus(Message, frozen=True):
    """One backend of a node as probed."""

    supported: bool
    reason: str = ""
    features: dict[str, FeatureReport] = {}


class Resources(Message, frozen=True):
    """Amounts: cores, MiB, sandboxes."""

    cores: float = 0.0
    memory_mb: int = 0
    sandboxes: int = 0


class Heartbeat(Versioned, frozen=True):
    """edge → watcher, ``dsec.hb.v1.<node>``, every second.

    ``capacity`` is what may be committed (overcommit included); ``committed`` the
    sum of the limits of the live sandboxes; ``used`` what was measured.
    ``counts[backend][project]`` are live sandboxes. ``epoch`` changes at every
    start of the edge process, ``seq`` rises by one a heartbeat. ``pressure`` are
    shares 0…1 of stalled time (cpu, memory, io). ``refusing`` names the limit that
    keeps a node from ``admitting`` ("over cpu pressure 0.98").
    """

    node: Token
    epoch: str
    seq: int
    at: UnixTime
    capacity: Resources
    committed: Resources
    used: Resources
    pool: Pool = "onprem"
    backends: dict[str, BackendStatus] = {}
    counts: dict[str, dict[str, int]] = {}
    pressure: dict[str, float] = {}
    admitting: bool = True
    version: str = ""
    hot_set: str | None = None
    refusing: str = ""


class JoinRequest(Versioned, frozen=True):
    """edge → scheduler, ``dsec.rpc.v1.scheduler.join.<node>``: who I am, which
    sandboxes live here. The answer makes the node's command queue exist."""

    node: Token
    epoch: str
    pool: Pool = "onprem"
    backends: dict[str, BackendStatus] = {}
    capacity: Resources = Resources()
    live: list[str] = []


class JoinReply(Versioned, frozen=True):
    """``forget``: sandboxes the edge holds and the scheduler knows to be over."""

    node: Token
    durable: str
    forget: list[str] = []


class NodeCommand(Versioned, frozen=True):
    """client → auth → scheduler, ``node.<cordon|uncordon|drain>``."""

    request_id: str
    node: Token
    verb: Annotated[str, Meta(pattern=r"^(cordon|uncordon|drain)$(?!\n)")] = "cordon"


class NodeInfo(Message, frozen=True):
    """A node as the watcher sees it. ``state``: ready, cordoned, draining or lost."""

    id: Token
    state: str
    pool: Pool
    capacity: Resources
    committed: Resources
    used: Resources
    backends: dict[str, BackendStatus] = {}
    counts: dict[str, dict[str, int]] = {}
    seen_at: UnixTime = 0.0
    epoch: str = ""


class NodeList(Versioned, frozen=True):
    """Answer of ``node.list``."""

    nodes: list[NodeInfo]
