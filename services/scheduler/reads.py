"""SQL of questions: pages of sandboxes, what an edge should and should not have.

Owns: statements that answer ``questions``. Does not own: changes of sandboxes but
one: the deadline of those that a starting edge does not have.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.sandbox import SandboxInfo, SandboxQuery, SandboxSpec
from services.scheduler.model import Sandbox, json_text
from services.scheduler.store import SELECT, fetch, sandbox_of
from shared.lifecycle import TIME_LIMITS

_STATES_ON = text("select uid, state, node from sandbox where uid = any(cast(:uids as text[])) ")
_FLAG_MISSING = text(
    "update sandbox set deadline_at = now() + make_interval(secs => :after) "
    "where node = :node and state in ('starting', 'running', 'pausing', 'paused', 'resuming') "
    "and not uid = any(cast(:live as text[])) and deadline_at is null"
)


async def over(connection: AsyncConnection, node: str, uids: Sequence[str]) -> list[str]:
    """Those of ``uids`` that should not live on ``node``: ended, elsewhere, unknown."""
    rows = await fetch(connection, _STATES_ON, uids=list(uids))
    ended = ("stopped", "failed", "rejected", "lost")
    good = {uid for uid, state, on in rows if on == node and state not in ended}
    return [uid for uid in uids if uid not in good]


async def flag_missing(
    connection: AsyncConnection, node: str, live: Sequence[str], *, after_s: float
) -> None:
    """Gives sandboxes that a starting edge does not have a deadline: without a word
    from it they are lost then."""
    await connection.execute(_FLAG_MISSING, {"node": node, "live": list(live), "after": after_s})


_USED_LAYERS = text(
    "select distinct layer->>'digest' from ("
    "  select distinct request_id, spec_idx from sandbox where request_id is not null"
    "  and (state not in ('stopped', 'failed', 'rejected', 'lost')"
    "       or state = 'lost' and changed_at > now() - make_interval(secs => :lost))"
    ") s join spec on spec.request_id = s.request_id and spec.idx = s.spec_idx, "
    "json_array_elements(convert_from(body, 'utf8')::json->'layers') as layer "
    "where resolved and layer->>'digest' = any(cast(:digests as text[]))"
)


async def used_layers(
    connection: AsyncConnection, digests: Sequence[str], *, lost_s: float
) -> list[str]:
    """Those of ``digests`` that living sandboxes have, or such as were lost in the last
    ``lost_s`` seconds: their node may only be cut off."""
    rows = await fetch(connection, _USED_LAYERS, digests=list(digests), lost=lost_s)
    return [digest for (digest,) in rows]


_ENDED = text(
    "select project, uid from sandbox where state in ('stopped', 'failed', 'rejected', 'lost') "
    "and changed_at > now() - make_interval(secs => :since) order by changed_at desc limit :n"
)


async def ended(
    connection: AsyncConnection, *, since_s: float, limit: int
) -> list[tuple[str, str]]:
    """Project and uid of what ended in the last ``since_s`` seconds, the latest first."""
    rows = await fetch(connection, _ENDED, since=since_s, n=limit)
    return [(project, uid) for project, uid in rows]


_ENVIRONMENTS = text(
    "select digests, sum(n)::bigint from ("
    "  select request_id, spec_idx, count(*) as n from sandbox where request_id is not null"
    "  and created_at > now() - make_interval(secs => :since) group by 1, 2"
    ") s join spec on spec.request_id = s.request_id and spec.idx = s.spec_idx, "
    "lateral (select array_agg(layer->>'digest' order by at) as digests from "
    "  json_array_elements(convert_from(body, 'utf8')::json->'layers')"
    "  with ordinality as t(layer, at)"
    ") l where resolved and digests is not null group by digests order by 2 desc, 1 limit :n"
)


async def environments(
    connection: AsyncConnection, *, since_s: float, limit: int
) -> list[tuple[list[str], int]]:
    """Layers, bottom first, and how many sandboxes were made of them in the last
    ``since_s`` seconds, the most frequent first."""
    rows = await fetch(connection, _ENVIRONMENTS, since=since_s, n=limit)
    return [(list(digests), count) for digests, count in rows]


_QUERY = """
    and (cast(:project as text) is null or s.project = :project)
    and (cast(:uids as text[]) is null or s.uid = any(cast(:uids as text[])))
    and (cast(:request_id as text) is null or s.request_id = :request_id)
    and (cast(:job as text) is null or s.job = :job)
    and (cast(:labels as text) is null or s.labels @> cast(:labels as jsonb))
    and (cast(:states as text[]) is null or s.state = any(cast(:states as text[])))
    and (cast(:node as text) is null or s.node = :node)
    and (cast(:after as text) is null or s.uid > :after)
    order by s.uid limit :n
"""
_LIST = text(SELECT + "where s.request_id is not null" + _QUERY)


async def page(connection: AsyncConnection, query: SandboxQuery, limit: int) -> list[Sandbox]:
    """Sandboxes that meet every given filter, in uid order."""
    rows = await fetch(
        connection, _LIST,
        project=query.project, uids=query.uids or None, request_id=query.request_id,
        job=query.job, labels=json_text(query.labels) if query.labels else None,
        states=list(query.states) or None, node=query.node, after=query.after, n=limit,
    )  # fmt: skip
    return [sandbox_of(r) for r in rows]


def info(row: Sandbox, spec: SandboxSpec | None) -> SandboxInfo:
    """A row as clients see it."""
    return SandboxInfo(
        uid=row.uid, project=row.project, state=row.state,  # type: ignore[arg-type]
        generation=row.generation, backend=row.backend, created_at=row.created_at,
        changed_at=row.changed_at, id=row.public_id, node=row.node,
        request_id=row.request_id, index=row.index, principal=row.principal, cause=row.cause,
        is_infra=row.is_infra, message=row.message, error=row.error, job=row.job,
        labels=row.labels, spec=spec, enforcement=row.enforcement,
        time_up=row.cause if row.cause in TIME_LIMITS else None,
    )  # fmt: skip
