"""Branches: sandboxes that begin with what another one is made of, where that is.

Owns: what a fork's spec means once its source is known. Does not own: the copy of what the
source changed (its edge), charges (auth), where the rows go (``creates``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from msgspec.structs import replace
from sqlalchemy.ext.asyncio import AsyncConnection

from schemas.base import WireError, decode, encode
from schemas.sandbox import CreateCommand, ResolvedSpec, SandboxSpec
from services.scheduler import requests, store
from services.scheduler.images import Answer
from services.scheduler.model import Sandbox
from services.scheduler.sending import SpecKey


class Item(Protocol):
    """One sandbox of a create command."""

    @property
    def command(self) -> CreateCommand: ...
    @property
    def key(self) -> SpecKey: ...
    @property
    def spec(self) -> SandboxSpec | None: ...


async def answers(connection: AsyncConnection, items: Iterable[Item]) -> dict[SpecKey, Answer]:
    """The resolved specs of those that are branches, or why they can be none."""
    wanted = {i.key: (i.command, i.spec) for i in items if i.spec and i.spec.source}
    if not wanted:
        return {}
    sources = {spec.source for _, spec in wanted.values() if spec.source}
    rows = {row.uid: row for row in await store.find(connection, sources)}
    keys = {key: _key(row) for key, row in rows.items()}
    bodies = await requests.specs(connection, keys.values())
    found = {uid: bodies.get(key) for uid, key in keys.items()}
    return {
        key: _answer(command, spec, rows.get(spec.source or ""), found.get(spec.source or ""))
        for key, (command, spec) in wanted.items()
    }


def _key(row: Sandbox) -> SpecKey:
    return (row.request_id or "", row.spec_idx)


def _answer(
    command: CreateCommand, spec: SandboxSpec, row: Sandbox | None,
    found: tuple[bytes, bool, list[str]] | None,
) -> Answer:  # fmt: skip
    if row is None or row.project != command.project or row.request_id is None:
        text = f"no sandbox {spec.source} in {command.project}"
        return None, WireError(code="not_found", message=text, field="source")
    if row.terminal:
        text = f"its source {row.uid} is {row.state}"
        return None, WireError(code="sandbox_died", message=text, cause=row.cause)
    if row.node is None or found is None or not found[1]:
        text = f"its source {row.uid} is {row.state}"
        return None, WireError(code="unavailable", message=text, retryable=True)
    source = decode(found[0], ResolvedSpec)
    own = replace(spec, backend=source.spec.backend, node=row.node)
    resolved = replace(source, spec=own, branch=command.request_id)
    return encode(resolved), None


def placed(spec: SandboxSpec, body: bytes) -> SandboxSpec:
    """The spec to place by: of a branch the one with its node."""
    return spec if spec.source is None else decode(body, ResolvedSpec).spec
