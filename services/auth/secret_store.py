"""SQL of secrets.

Owns: these statements. Does not own: what a sealed value is (:mod:`services.auth.sealing`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.secret import SecretInfo

MAX_LISTED = 1_000
"""Secrets of one project."""

_FIELDS = (
    "name, version, hosts, plain, extract(epoch from changed_at)::double precision, changed_by, "
    "sealed"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A secret with its sealed value."""

    info: SecretInfo
    sealed: bytes

    def __repr__(self) -> str:
        return f"Row({self.info!r})"


async def find(
    connection: AsyncConnection, project: str, names: Collection[str] | None = None
) -> dict[str, Row]:
    """Secrets of a project by name; all of them without ``names``."""
    rows = await connection.execute(
        text(
            f"select {_FIELDS} from secret where project = :p "
            "and (cast(:n as text[]) is null or name = any(cast(:n as text[]))) "
            "order by name limit :most"
        ),
        {"p": project, "n": None if names is None else list(names), "most": MAX_LISTED},
    )
    return {
        r[0]: Row(
            SecretInfo(
                name=r[0], version=r[1], hosts=list(r[2]), plain=r[3], changed_at=r[4],
                changed_by=r[5],
            ),
            bytes(r[6]),
        )
        for r in rows
    }  # fmt: skip


async def count(connection: AsyncConnection, project: str) -> int:
    """How many a project has."""
    query = text("select count(*) from secret where project = :p")
    return int((await connection.execute(query, {"p": project})).scalar_one())


async def put(connection: AsyncConnection, project: str, row: Row) -> None:
    """A new secret, or what it is now."""
    info = row.info
    await connection.execute(
        text(
            "insert into secret (project, name, version, hosts, plain, sealed, changed_at, "
            "changed_by) values (:p, :n, :v, cast(:h as text[]), :plain, :s, "
            "to_timestamp(:at), :by) on conflict (project, name) do update set "
            "version = excluded.version, hosts = excluded.hosts, plain = excluded.plain, "
            "sealed = excluded.sealed, changed_at = excluded.changed_at, "
            "changed_by = excluded.changed_by"
        ),
        {
            "p": project, "n": info.name, "v": info.version, "h": info.hosts,
            "plain": info.plain, "s": row.sealed, "at": info.changed_at, "by": info.changed_by,
        },
    )  # fmt: skip


async def remove(connection: AsyncConnection, project: str, name: str) -> bool:
    """Whether it was there."""
    result = await connection.execute(
        text("delete from secret where project = :p and name = :n"), {"p": project, "n": name}
    )
    return result.rowcount > 0
