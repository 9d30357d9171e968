"""All SQL on nodes: what they can hold, what is committed, whether they are heard.

Owns: statements on ``node``. ``committed_*`` change in the transaction that changes
the sandboxes they are for, and in no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.node import BackendStatus, Heartbeat, JoinRequest, Resources
from services.scheduler.model import Sandbox, json_text
from services.scheduler.placement import Amounts, NodeView
from shared.db import fetch
from shared.errors import Internal

REFUSING = "not admitting"
"""Why a node takes nothing that does not say why."""

_backends = msgspec.json.Decoder(dict[str, BackendStatus])


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A row of ``node``. Times in seconds since the epoch."""

    id: str
    admin: str
    pool: str
    epoch: str
    admitting: bool
    capacity: Resources
    committed: Resources
    backends: dict[str, BackendStatus]
    seen_at: float
    lost_at: float | None = None

    @property
    def state(self) -> str:
        """ready, cordoned, draining or lost."""
        return "lost" if self.lost_at is not None else self.admin

    def view(self, pressure: float = 0.0, refusing: str = "") -> NodeView:
        """The row as placement takes it. ``refusing``: the limit that the node says
        it has reached."""
        away = self.state if self.state != "ready" else refusing
        return NodeView(
            self.id, self.pool, self.capacity, self.backends,
            cores=self.committed.cores, memory_mb=self.committed.memory_mb,
            sandboxes=self.committed.sandboxes, pressure=pressure,
            away=away or ("" if self.admitting else REFUSING),
        )  # fmt: skip


_SELECT = """
    select id, admin, pool, epoch, admitting, backends::text, capacity_cores,
        capacity_memory_mb, capacity_sandboxes, committed_cores, committed_memory_mb,
        committed_sandboxes, extract(epoch from seen_at)::float8,
        extract(epoch from lost_at)::float8
    from node
"""
_ALL = text(_SELECT + "order by id")
_LOCK = text(_SELECT + "where id = any(cast(:ids as text[])) order by id for update")
_LOCK_ALL = text(_SELECT + "order by id for update")
_decoded: dict[str, dict[str, BackendStatus]] = {}
MAX_DECODED = 4096


def _reports(body: str) -> dict[str, BackendStatus]:
    # nodes report the same few things for hours: decoded once
    found = _decoded.get(body)
    if found is None:
        if len(_decoded) >= MAX_DECODED:
            _decoded.clear()
        found = _decoded[body] = _backends.decode(body)
    return found


def _node(row: Any) -> Node:
    return Node(
        id=row[0], admin=row[1], pool=row[2], epoch=row[3], admitting=row[4],
        backends=_reports(row[5]),
        capacity=Resources(cores=row[6], memory_mb=row[7], sandboxes=row[8]),
        committed=Resources(cores=row[9], memory_mb=row[10], sandboxes=row[11]),
        seen_at=row[12], lost_at=row[13],
    )  # fmt: skip


async def every(connection: AsyncConnection) -> list[Node]:
    """All nodes, by id."""
    return [_node(r) for r in await fetch(connection, _ALL)]


async def lock(connection: AsyncConnection, ids: Iterable[str] | None) -> list[Node]:
    """The nodes of ``ids`` (``None``: all), locked in the order of their ids."""
    if ids is None:
        return [_node(r) for r in await fetch(connection, _LOCK_ALL)]
    return [_node(r) for r in await fetch(connection, _LOCK, {"ids": sorted(ids)})]


def deltas(was: Mapping[str, Sandbox], rows: Iterable[Sandbox]) -> Amounts:
    """What a change of rows means for the nodes: every row that leaves a node gives
    back what it took, every row that comes to one takes it."""
    total: dict[str, list[float]] = {}
    for row in rows:
        old = was.get(row.uid)
        before = old.node if old is not None and old.on_node else None
        after = row.node if row.on_node else None
        if before == after:
            continue
        for node, sign in ((before, -1), (after, 1)):
            if node is not None:
                sums = total.setdefault(node, [0.0, 0, 0])
                sums[0] += sign * row.cores
                sums[1] += sign * row.memory_mb
                sums[2] += sign
    return {node: (c, int(m), int(n)) for node, (c, m, n) in total.items()}


_COMMIT = text(
    "with n as (select * from unnest(cast(:id as text[]), cast(:c as float8[]), "
    "cast(:m as bigint[]), cast(:s as bigint[])) as n(id, c, m, s)), "
    "l as (select id from node where id in (select id from n) order by id for update) "
    "update node set committed_cores = case when committed_sandboxes + n.s = 0 then 0 "
    "else committed_cores + n.c end, "
    "committed_memory_mb = committed_memory_mb + n.m, "
    "committed_sandboxes = committed_sandboxes + n.s "
    "from n, l where node.id = n.id and l.id = n.id and (n.s <= 0 or "
    "(committed_sandboxes + n.s <= capacity_sandboxes "
    "and committed_memory_mb + n.m <= capacity_memory_mb "
    "and committed_cores + n.c <= capacity_cores + 1e-6)) returning node.id"
)


async def commit(connection: AsyncConnection, amounts: Amounts) -> None:
    """Adds ``amounts`` to what the nodes have committed, within their capacity.
    The caller has locked them and seen that it fits."""
    moved = {n: a for n, a in amounts.items() if a[2] or a[1] or abs(a[0]) > 1e-9}
    if not moved:
        return
    written = await fetch(
        connection,
        _COMMIT,
        {
            "id": list(moved),
            "c": [a[0] for a in moved.values()],
            "m": [a[1] for a in moved.values()],
            "s": [a[2] for a in moved.values()],
        },
    )
    if len(written) != len(moved):
        raise Internal("a node was committed beyond its capacity")


_SEEN = text(
    "insert into node (id, admin, pool, epoch, admitting, backends, capacity_cores, "
    "capacity_memory_mb, capacity_sandboxes) "
    "select i, 'ready', p, e, a, b::jsonb, c, m, s from unnest(cast(:i as text[]), "
    "cast(:p as text[]), cast(:e as text[]), cast(:a as boolean[]), cast(:b as text[]), "
    "cast(:c as float8[]), cast(:m as bigint[]), cast(:s as bigint[])) "
    "as n(i, p, e, a, b, c, m, s) order by i "
    "on conflict (id) do update set pool = excluded.pool, epoch = excluded.epoch, "
    "admitting = excluded.admitting, backends = excluded.backends, "
    "capacity_cores = excluded.capacity_cores, "
    "capacity_memory_mb = excluded.capacity_memory_mb, "
    "capacity_sandboxes = excluded.capacity_sandboxes, seen_at = now(), lost_at = null"
)


async def seen(connection: AsyncConnection, reports: Sequence[Heartbeat | JoinRequest]) -> None:
    """Writes what nodes said of themselves; a lost one is back."""
    if not reports:
        return
    last = {r.node: r for r in reports}.values()
    await connection.execute(
        _SEEN,
        {
            "i": [r.node for r in last],
            "p": [r.pool for r in last],
            "e": [r.epoch for r in last],
            "a": [getattr(r, "admitting", True) for r in last],
            "b": [json_text(r.backends) for r in last],
            "c": [r.capacity.cores for r in last],
            "m": [r.capacity.memory_mb for r in last],
            "s": [r.capacity.sandboxes for r in last],
        },
    )


_SILENT = text(
    "update node set lost_at = now() where lost_at is null "
    "and seen_at < now() - make_interval(secs => :silence) "
    "and not id = any(cast(:heard as text[])) returning id"
)


async def mark_lost(
    connection: AsyncConnection, silence_s: float, heard: Iterable[str]
) -> list[str]:
    """Marks nodes that nobody wrote of for ``silence_s`` and that are not in
    ``heard``; returns them."""
    rows = await connection.execute(_SILENT, {"silence": silence_s, "heard": list(heard)})
    return [r[0] for r in rows]


_ADMIN = text("update node set admin = :admin where id = :id returning id")


async def set_admin(connection: AsyncConnection, node: str, admin: str) -> bool:
    """Sets what the operator wants of a node; ``False`` for an unknown one."""
    result = await connection.execute(_ADMIN, {"id": node, "admin": admin})
    return result.first() is not None


_DRIFT = text(
    "select n.id, n.committed_sandboxes, count(s.uid), n.committed_memory_mb, "
    "coalesce(sum(s.memory_mb), 0) from node n left join sandbox s on s.node = n.id "
    "and s.state in ('placed', 'starting', 'running', 'pausing', 'paused', 'resuming', "
    "'stopping') group by n.id "
    "having n.committed_sandboxes <> count(s.uid) "
    "or n.committed_memory_mb <> coalesce(sum(s.memory_mb), 0)"
)


async def drift(connection: AsyncConnection) -> list[str]:
    """Nodes whose counters differ from their sandboxes: always none, or a bug."""
    return [
        f"{r[0]}: {r[1]} sandboxes and {r[3]} MiB committed, {r[2]} and {r[4]} there"
        for r in await connection.execute(_DRIFT)
    ]
