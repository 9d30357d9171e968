"""All SQL of imagesvc."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import RowMapping, text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.image import ImageInfo, Kind, LayerProvenance
from schemas.sandbox import ImageConfig, LayerRef
from services.imagesvc import leases
from services.imagesvc.environments import Key
from services.imagesvc.names import ImageName
from shared.blobs.layout import LayerManifest
from shared.errors import NotFound

_SELECT = """
select i.project, i.name, i.tag, i.kind, i.config, i.size_bytes, i.provenance,
       extract(epoch from i.created_at)::float8 as created_at,
       (select json_agg(json_build_object('digest', l.digest, 'size_bytes', l.size_bytes)
                        order by il.position)
          from image_layer il join layer l using (digest)
         where (il.project, il.name, il.tag) = (i.project, i.name, i.tag)) as layers
  from image i
"""
_NAMED = "(project, name, tag) = (:project, :name, :tag)"
_REPLACED = (
    "on conflict (project, name, tag) do update set kind = excluded.kind, "
    "config = excluded.config, size_bytes = excluded.size_bytes, "
    "principal = excluded.principal, provenance = excluded.provenance, created_at = now()"
)


async def images(connection: AsyncConnection, keys: Iterable[Key]) -> dict[Key, ImageInfo]:
    """Those of ``keys`` that there are."""
    wanted = sorted(keys)
    rows = await connection.execute(
        text(
            _SELECT + "join unnest(cast(:p as text[]), cast(:n as text[]), cast(:t as text[])) "
            "as k(project, name, tag) using (project, name, tag)"
        ),
        {
            "p": [project for project, _ in wanted],
            "n": [name.name for _, name in wanted],
            "t": [name.tag for _, name in wanted],
        },
    )
    return {
        (row["project"], ImageName(row["name"], row["tag"])): _info(row) for row in rows.mappings()
    }


async def in_projects(
    connection: AsyncConnection, projects: Sequence[str], *, kind: Kind | None, limit: int
) -> list[ImageInfo]:
    """All images of ``projects`` (of one kind), by name."""
    rows = await connection.execute(
        text(
            _SELECT + "where i.project = any(cast(:projects as text[])) "
            "and (cast(:kind as text) is null or i.kind = cast(:kind as text)) "
            "order by i.name, i.tag, i.project limit :n"
        ),
        {"projects": list(projects), "kind": kind, "n": limit},
    )
    return [_info(row) for row in rows.mappings()]


def _info(row: RowMapping) -> ImageInfo:
    return ImageInfo(
        name=str(ImageName(row["name"], row["tag"])),
        project=row["project"],
        kind=row["kind"],
        layers=msgspec.convert(row["layers"] or [], list[LayerRef]),
        config=msgspec.convert(row["config"], ImageConfig),
        size_bytes=row["size_bytes"],
        created_at=row["created_at"],
        provenance=row["provenance"] and msgspec.convert(row["provenance"], LayerProvenance),
    )


async def register(
    connection: AsyncConnection,
    key: Key,
    *,
    kind: Kind,
    config: ImageConfig,
    layers: Sequence[LayerManifest],
    principal: str,
    provenance: LayerProvenance | None = None,
) -> None:
    """Points a name to layers under a lease, whatever it pointed to before."""
    where = _where(key)
    await leases.no_longer_named(connection, where)
    await connection.execute(
        text(
            "insert into image "
            "(project, name, tag, kind, config, size_bytes, principal, provenance) "
            "values (:project, :name, :tag, :kind, cast(:config as jsonb), :size, :principal, "
            "cast(:provenance as jsonb)) " + _REPLACED
        ),
        where
        | {
            "kind": kind,
            "config": msgspec.json.encode(config).decode(),
            "size": sum(one.size_bytes for one in layers),
            "principal": principal,
            "provenance": provenance and msgspec.json.encode(provenance).decode(),
        },
    )
    await connection.execute(
        text("delete from image_layer where " + _NAMED), where
    )
    await connection.execute(
        text(
            "insert into image_layer (project, name, tag, position, digest) "
            "select :project, :name, :tag, n - 1, d "
            "from unnest(cast(:d as text[])) with ordinality as t(d, n)"
        ),
        where | {"d": [one.digest for one in layers]},
    )


async def copy(connection: AsyncConnection, source: Key, target: Key, *, principal: str) -> None:
    """Points ``target`` to what ``source`` means, whatever it pointed to before. Raises
    ``NotFound`` where ``source`` has gone."""
    where = _where(target) | {f"s{key}": value for key, value in _where(source).items()}
    if source == target:
        return
    await leases.no_longer_named(connection, _where(target))
    done = await connection.execute(
        text(
            "insert into image "
            "(project, name, tag, kind, config, size_bytes, principal, provenance) "
            "select :project, :name, :tag, kind, config, size_bytes, :principal, provenance "
            "from image "
            "where (project, name, tag) = (:sproject, :sname, :stag) for share "
            + _REPLACED
        ),
        where | {"principal": principal},
    )
    if not done.rowcount:
        raise NotFound(f"no image {source[1]} in project {source[0]}", field="name")
    await connection.execute(text("delete from image_layer where " + _NAMED), _where(target))
    await connection.execute(
        text(
            "insert into image_layer (project, name, tag, position, digest) "
            "select :project, :name, :tag, position, digest from image_layer "
            "where (project, name, tag) = (:sproject, :sname, :stag)"
        ),
        where,
    )


async def remove(connection: AsyncConnection, key: Key) -> bool:
    """Forgets a name; ``False`` where it was not there. Its layers stay for a while."""
    await leases.no_longer_named(connection, _where(key))
    done = await connection.execute(
        text("delete from image where " + _NAMED), _where(key)
    )
    return bool(done.rowcount)


def _where(key: Key) -> dict[str, str]:
    project, name = key
    return {"project": project, "name": name.name, "tag": name.tag}


async def answered(
    connection: AsyncConnection, project: str, request_id: str
) -> tuple[bytes, bytes] | None:
    """The digest and the answer of a request that came before."""
    row = (
        await connection.execute(
            text("select sha256, reply from request where project = :p and id = :id"),
            {"p": project, "id": request_id},
        )
    ).first()
    return None if row is None else (bytes(row[0]), bytes(row[1]))


async def answer(
    connection: AsyncConnection, project: str, request_id: str, *, sha256: bytes, reply: bytes
) -> None:
    """Keeps the answer of a request; the first one stays."""
    await connection.execute(
        text(
            "insert into request (project, id, sha256, reply) values (:p, :id, :sha256, :reply) "
            "on conflict do nothing"
        ),
        {"p": project, "id": request_id, "sha256": sha256, "reply": reply},
    )


async def prune_requests(connection: AsyncConnection, *, keep_s: float, limit: int) -> int:
    """Forgets requests older than ``keep_s`` seconds, at most ``limit``; returns how
    many."""
    result = await connection.execute(
        text(
            "delete from request where (project, id) in (select project, id from request "
            "where at < now() - make_interval(secs => :keep) limit :n for update skip locked)"
        ),
        {"keep": keep_s, "n": limit},
    )
    return result.rowcount
