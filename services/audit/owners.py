"""The table of whose a sandbox is: all its SQL. Rows outlive what the scheduler keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import astuple, dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.db import Database, fetch

_LOAD = text(
    "select uid, node, project, principal, job, task from owner "
    "where uid = any(cast(:uids as text[]))"
)
_SAVE = text(
    "insert into owner (uid, node, project, principal, job, task) "
    "select * from unnest(cast(:uid as text[]), cast(:node as text[]), cast(:project as text[]),"
    " cast(:principal as text[]), cast(:job as text[]), cast(:task as text[])) "
    "on conflict (uid) do update set node = excluded.node, at = now()"
)
_PRUNE = text(
    "delete from owner where uid in (select uid from owner "
    "where at < now() - make_interval(secs => :keep) limit :n for update skip locked) "
    "returning uid"
)
_NAMES = ("uid", "node", "project", "principal", "job", "task")


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose sandbox ``uid`` is; empty where nobody said."""

    uid: str
    node: str
    project: str
    principal: str
    job: str
    task: str


async def load(db: Database, uids: Collection[str]) -> dict[str, Owner]:
    """Those that are known."""
    if not uids:
        return {}
    async with db.transaction() as connection:
        rows = await fetch(connection, _LOAD, {"uids": list(uids)})
    return {row["uid"]: Owner(*row) for row in rows}


async def save(db: Database, owners: Iterable[Owner]) -> None:
    """Adds rows; of known ones only the node can change."""
    rows = sorted(map(astuple, owners))
    columns = dict(zip(_NAMES, map(list, zip(*rows, strict=True)), strict=True))
    async with db.transaction() as connection:
        await connection.execute(_SAVE, columns)


async def prune(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Removes rows past their use, at most ``limit``; returns how many."""
    return len(await fetch(connection, _PRUNE, {"keep": keep_s, "n": limit}))
