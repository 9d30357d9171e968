"""Messages of burst: utilisation and the plan that follows from it."""

from __future__ import annotations

from schemas.base import Message, UnixTime, Versioned
from schemas.node import Resources


class PoolLoad(Message, frozen=True):
    """One pool: its nodes and what of it is committed and used."""

    nodes: int
    capacity: Resources
    committed: Resources
    used: Resources
    utilisation: float


class BurstPlan(Versioned, frozen=True):
    """burst → everyone, ``dsec.evt.v1.burst.plan.<key>``. ``share`` is the portion
    (0…1) of eligible creations to be placed in the cloud; ``lease`` and ``release``
    are numbers of nodes to add or give back."""

    at: UnixTime
    utilisation: float
    threshold: float
    share: float
    lease: int
    release: int
    reason: str
    pools: dict[str, PoolLoad] = {}


class BurstLease(Versioned, frozen=True):
    """burst's own record of a cloud node: requested, joined, released, failed."""

    lease_id: str
    provider: str
    state: str
    node: str | None = None
    at: UnixTime = 0.0
    reason: str = ""
