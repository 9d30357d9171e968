"""What the scheduler forgets: sandboxes that ended long ago and all that hangs on them.

Owns: the statements that delete, each for a portion. What lives is never touched: only
ended sandboxes go, and requests, specs and transitions only with the last of theirs.
Of nodes those go that were lost long ago, unless an operator cordoned them.
"""

from __future__ import annotations

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from services.scheduler.store import LIVE, fetch

_ENDED = text(
    "with old as (select uid from sandbox "
    "where state in ('stopped', 'failed', 'rejected', 'lost') "
    "and changed_at < now() - make_interval(secs => :keep) "
    "order by changed_at limit :n for update skip locked), "
    "steps as (delete from transition where uid in (select uid from old)) "
    "delete from sandbox where uid in (select uid from old) returning uid"
)
_REQUESTS = text(
    "with old as (select request_id from request r "
    "where at < now() - make_interval(secs => :keep) "
    "and not exists (select 1 from sandbox s where s.request_id = r.request_id) "
    "order by at limit :n for update skip locked), "
    "specs as (delete from spec where request_id in (select request_id from old)) "
    "delete from request where request_id in (select request_id from old) returning request_id"
)
_OPS = text(
    "delete from op where request_id in (select request_id from op "
    "where at < now() - make_interval(secs => :keep) limit :n for update skip locked) "
    "returning request_id"
)


_JOBS = text(
    "delete from job where (project, id) in (select project, id from job j "
    "where state <> 'leased' and changed_at < now() - make_interval(secs => :keep) "
    "and not exists (select 1 from sandbox s "
    f"where s.project = j.project and s.job = j.id and {LIVE}) "
    "limit :n for update skip locked) returning id"
)


_NODES = text(
    "delete from node where id in (select id from node n "
    "where lost_at < now() - make_interval(secs => :keep) and admin <> 'cordoned' "
    f"and not exists (select 1 from sandbox s where s.node = n.id and {LIVE}) "
    "limit :n for update skip locked) returning id"
)


async def ended(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Deletes sandboxes that ended ``keep_s`` ago with their history; returns how many."""
    return len(await fetch(connection, _ENDED, keep=keep_s, n=limit))


async def requests(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Deletes requests as old that have no sandbox any more, with their specs."""
    return len(await fetch(connection, _REQUESTS, keep=keep_s, n=limit))


async def operations(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Deletes operations that nobody completed."""
    return len(await fetch(connection, _OPS, keep=keep_s, n=limit))


async def jobs(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Deletes jobs that nobody holds or used for so long, and that nothing lives of."""
    return len(await fetch(connection, _JOBS, keep=keep_s, n=limit))


async def nodes(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Deletes nodes that were lost so long ago and hold nothing."""
    return len(await fetch(connection, _NODES, keep=keep_s, n=limit))
