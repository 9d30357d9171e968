"""Whose a sandbox is: its project, principal, job and task.

Owns: audit's own table of that, a cache over it, asking the scheduler for what neither
has. Does not own: the truth; the scheduler does.

A node may speak for its own sandboxes only. What it says of another's, or of one that
never was, is recorded as its word and counts for nothing else. Where the scheduler does
not answer, nobody can tell the two apart: the batch waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from schemas.sandbox import SandboxInfo, SandboxPage, SandboxQuery
from schemas.subjects import rpc
from services.audit import owners
from services.audit.owners import Owner
from shared import ids
from shared.bus import Bus
from shared.clock import Clock
from shared.db import Database

TASK_LABELS = ("task", "task_id", "instance_id")
"""Labels that may say which task a sandbox works on, the first that is there."""
CACHED = 50_000
FRESH_S = 2.0
"""How old an answer may be that denies a node its sandbox: it may have moved there."""
ASK_S = 3.0
ASKED_AT_ONCE = 500


class Correlation:
    """Owners of sandboxes, by uid."""

    def __init__(self, bus: Bus, db: Database, clock: Clock) -> None:
        self._bus = bus
        self._db = db
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, Owner | None]] = OrderedDict()

    async def owners(self, claims: Collection[tuple[str, str]]) -> Mapping[str, Owner]:
        """Owners of the sandboxes in ``claims`` (uid, the node that speaks of it or
        empty), as far as they exist. Raises ``Unavailable`` where that cannot be found
        out."""
        missing = {uid for uid, node in claims if self._doubtful(uid, node)}
        if missing:
            await self._look_up(missing, claims)
        found = {uid: self._known[uid][1] for uid, _ in claims if uid in self._known}
        return {uid: owner for uid, owner in found.items() if owner is not None}

    def _doubtful(self, uid: str, node: str) -> bool:
        """Whether it must be asked: nobody knows it, or the node is not the one known."""
        if not ids.is_ulid(uid):
            return False
        known = self._known.get(uid)
        if known is None:
            return True
        at, owner = known
        if owner is not None and node in ("", owner.node):
            return False
        return self._clock.monotonic() - at > FRESH_S

    async def _look_up(self, uids: set[str], claims: Collection[tuple[str, str]]) -> None:
        stored = await owners.load(self._db, uids - self._known.keys())
        for uid, owner in stored.items():
            self._remember(uid, owner, at=-FRESH_S)  # it may be another node's by now
        ask = {uid for uid, node in claims if uid in uids and self._doubtful(uid, node)}
        asked: dict[str, Owner] = {}
        for part in _parts(sorted(ask)):
            query = SandboxQuery(uids=part, limit=len(part))
            page = await self._bus.request(
                rpc("scheduler", "sandboxes"), query, SandboxPage, timeout_s=ASK_S
            )
            asked |= {info.uid: owner_of(info) for info in page.sandboxes}
        if asked:
            await owners.save(self._db, asked.values())
        now = self._clock.monotonic()
        for uid in ask:
            self._remember(uid, asked.get(uid) or stored.get(uid), at=now)

    def _remember(self, uid: str, owner: Owner | None, *, at: float) -> None:
        self._known[uid] = at, owner
        self._known.move_to_end(uid)
        while len(self._known) > CACHED:
            self._known.popitem(last=False)


def owner_of(info: SandboxInfo) -> Owner:
    """What audit keeps of a sandbox."""
    tasks = (info.labels.get(label) for label in TASK_LABELS)
    return Owner(
        uid=info.uid, node=info.node or "", project=info.project, principal=info.principal,
        job=info.job or "", task=next((t for t in tasks if t), ""),
    )  # fmt: skip


def _parts(uids: list[str]) -> list[list[str]]:
    return [uids[i : i + ASKED_AT_ONCE] for i in range(0, len(uids), ASKED_AT_ONCE)]
