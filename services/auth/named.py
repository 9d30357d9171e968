"""Named policies: kept by project and version, found from below, worked into creates.

Owns: their changes and SQL, and which one a name means: that of the nearest project, the
newest version unless one is named; presets are names that every project has and may define
anew. Does not own: what a document says (:mod:`shared.policies`). A version never changes:
what a sandbox was started with can be looked up later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.iam import IamReply, PolicyCreate, PolicyDelete, PolicyInfo
from schemas.policy import Preset
from schemas.sandbox import SandboxSpec
from services.auth.changes import Change, Context, Done
from shared import policies
from shared.errors import InvalidRequest, NotFound, QuotaExceeded

MAX_DOCUMENT_BYTES = 64 * 1024
MAX_VERSIONS = 1_000
MAX_LISTED = 1_000
"""Names of one project and those above it."""

_FIELDS = (
    "name, version, project, extract(epoch from created_at)::double precision, created_by, document"
)


def _presets(path: Sequence[str]) -> list[PolicyInfo]:
    """As they are without a project's own policies of their names: the root's first versions."""
    return [
        PolicyInfo(
            name=name, version=1, project=path[0], created_at=0, created_by="",
            document={"preset": name},
        )
        for name in get_args(Preset)
    ]  # fmt: skip


def _info(row: Any, *, whole: bool) -> PolicyInfo:
    return PolicyInfo(
        name=row[0], version=row[1], project=row[2], created_at=row[3], created_by=row[4],
        document=msgspec.json.decode(row[5]) if whole else {},
    )  # fmt: skip


async def find(connection: AsyncConnection, path: Sequence[str], reference: str) -> PolicyInfo:
    """What ``name[:version]`` means in the project whose ids from the root are ``path``.
    Raises ``NotFound``."""
    found = await _stored(connection, path, reference)
    if found is not None:
        return found
    for preset in _presets(path):
        if reference in (preset.name, f"{preset.name}:{preset.version}"):
            return preset
    raise NotFound(f"there is no policy {reference}", field="policy")


async def _stored(
    connection: AsyncConnection, path: Sequence[str], reference: str
) -> PolicyInfo | None:
    name, _, version = reference.partition(":")
    rows = await connection.execute(
        text(
            f"select {_FIELDS} from policy where name = :n and project = any(cast(:p as text[])) "
            "and project = (select project from policy where name = :n "
            "  and project = any(cast(:p as text[])) "
            "  order by array_position(cast(:p as text[]), project) desc limit 1) "
            "and (cast(:v as integer) is null or version = :v) order by version desc limit 1"
        ),
        {"n": name, "p": list(path), "v": int(version) if version else None},
    )
    row = rows.first()
    return None if row is None else _info(row, whole=True)


async def listed(connection: AsyncConnection, path: Sequence[str]) -> list[PolicyInfo]:
    """The newest version of every name that a project sees."""
    rows = await connection.execute(
        text(
            f"select distinct on (name) {_FIELDS} from policy "
            "where project = any(cast(:p as text[])) order by name, "
            "array_position(cast(:p as text[]), project) desc, version desc limit :most"
        ),
        {"p": list(path), "most": MAX_LISTED},
    )
    own = [_info(row, whole=False) for row in rows]
    names = {each.name for each in own}
    presets = [msgspec.structs.replace(each, document={}) for each in _presets(path)]
    return own + [each for each in presets if each.name not in names]


async def create(context: Context, body: PolicyCreate) -> Done:
    """The next version of a name in the context's project."""
    document = msgspec.json.encode(body.document)
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InvalidRequest(f"a policy has at most {MAX_DOCUMENT_BYTES} bytes", field="document")
    policies.read(body.document, {})
    last = await _stored(context.connection, [context.project], body.name)
    if last is None or last.document != body.document:
        version = last.version + 1 if last else 1
        if version > MAX_VERSIONS:
            raise QuotaExceeded(f"at most {MAX_VERSIONS} versions", field="name")
        last = PolicyInfo(
            name=body.name, version=version, project=context.project, created_at=context.now,
            created_by=context.caller, document=body.document,
        )  # fmt: skip
        await _add(context, last, document.decode())
    return Done(IamReply(policy=last), target=f"{last.name}:{last.version}")


async def _add(context: Context, info: PolicyInfo, document: str) -> None:
    await context.connection.execute(
        text(
            "insert into policy (project, name, version, document, created_at, created_by) "
            "values (:p, :n, :v, :d, to_timestamp(:at), :by)"
        ),
        {
            "p": info.project, "n": info.name, "v": info.version, "d": document,
            "at": info.created_at, "by": info.created_by,
        },
    )  # fmt: skip


async def delete(context: Context, body: PolicyDelete) -> Done:
    """A version of a name in the context's project, or all. Sandboxes keep what they have."""
    result = await context.connection.execute(
        text(
            "delete from policy where project = :p and name = :n "
            "and (cast(:v as integer) is null or version = :v)"
        ),
        {"p": context.project, "n": body.name, "v": body.version},
    )
    if result.rowcount == 0:
        raise NotFound(f"there is no such policy {body.name} in {context.project}", field="name")
    return Done(IamReply(), target=body.name)


CHANGES: dict[str, tuple[type[Any], Change]] = {
    "policy.create": (PolicyCreate, create),
    "policy.delete": (PolicyDelete, delete),
}
"""Body and step of each verb."""


def applied(spec: SandboxSpec, found: PolicyInfo) -> SandboxSpec:
    """The spec with the document that its name means. Raises ``InvalidRequest`` or
    ``Unsupported`` where its own network rules do not go with it."""
    required = found.document.get("require", [])
    made = msgspec.structs.replace(
        spec, policy=found.document, policy_name=f"{found.name}:{found.version}",
        require=list(dict.fromkeys([*spec.require, *required])),
    )  # fmt: skip
    policies.read(made.policy, made.network_rules, made.require)
    return made
