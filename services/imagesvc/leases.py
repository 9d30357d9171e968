"""SQL of garbage collection: leases, and layers that nothing points to.

Owns: the order that makes it safe. A layer's row is there before its files, and a lease
on it is taken in the statement that locks the row; the collector locks the row, removes the
files, then the row. So whoever wants a layer that is being removed waits and finds it gone.
Does not own: names (``store``), files (:mod:`shared.blobs`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from shared.blobs.layout import LayerFiles, LayerManifest

_KNOW = text(
    "insert into layer (digest, size_bytes, entries) "
    "select * from unnest(cast(:d as text[]), cast(:s as bigint[]), cast(:e as bigint[])) "
    "order by 1 on conflict (digest) do update set used_at = now() returning digest, xmax = 0"
)
_LEASE = text(
    "insert into lease (holder, digest, until) "
    "select :holder, d, now() + make_interval(secs => :s) from unnest(cast(:d as text[])) as t(d) "
    "on conflict (holder, digest) do update set until = excluded.until"
)
_FREE = """
    from layer l where used_at < now() - make_interval(secs => :age)
    and not exists (select from image_layer i where i.digest = l.digest)
    and not exists (select from lease where lease.digest = l.digest and until > now())
"""
_CANDIDATES = text("select digest" + _FREE + "and digest > :after order by digest limit :n")
_LOCK = text(
    "select digest" + _FREE + "and digest = any(cast(:d as text[])) for update of l skip locked"
)
_USED = text(
    "update layer set used_at = now() where digest in (select digest from image_layer "
    "where (project, name, tag) = (:project, :name, :tag))"
)


async def take(
    connection: AsyncConnection, layers: Sequence[LayerFiles | LayerManifest], *, holder: str,
    seconds: float,
) -> list[str]:  # fmt: skip
    """Keeps ``layers``, stored or about to be, for ``holder``; returns the digests of those
    that nobody knew."""
    known = {one.digest: one for one in layers}
    rows = await connection.execute(
        _KNOW,
        {
            "d": list(known),
            "s": [one.size_bytes for one in known.values()],
            "e": [one.entries for one in known.values()],
        },
    )
    fresh = [str(digest) for digest, inserted in rows if inserted]
    await connection.execute(_LEASE, {"holder": holder, "d": list(known), "s": seconds})
    return fresh


async def give_back(connection: AsyncConnection, holder: str) -> None:
    """Ends a holder's leases: its layers have names now, or are not wanted."""
    await connection.execute(text("delete from lease where holder = :h"), {"h": holder})


async def no_longer_named(connection: AsyncConnection, where: dict[str, str]) -> None:
    """A name is about to let go of its layers: their age counts from now."""
    await connection.execute(_USED, where)


async def candidates(
    connection: AsyncConnection, *, age_s: float, after: str, limit: int
) -> list[str]:
    """Layers that no name and no lease kept for ``age_s`` seconds, by digest."""
    rows = await connection.execute(_CANDIDATES, {"age": age_s, "after": after, "n": limit})
    return [str(row[0]) for row in rows]


async def lock_free(
    connection: AsyncConnection, digests: Sequence[str], *, age_s: float
) -> list[str]:
    """Those of ``digests`` that are still free, locked until the transaction ends."""
    rows = await connection.execute(_LOCK, {"age": age_s, "d": list(digests)})
    return [str(row[0]) for row in rows]


async def forget(connection: AsyncConnection, digests: Sequence[str]) -> None:
    """Layers whose files are gone."""
    parameters = {"d": list(digests)}
    gone = "digest = any(cast(:d as text[]))"
    await connection.execute(text("delete from lease where " + gone), parameters)
    await connection.execute(text("delete from layer where " + gone), parameters)
