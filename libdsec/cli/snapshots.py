"""``dsec pack-diff``, ``snapshot``, ``restore``, ``fork``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from libdsec import Layer, Sandbox, Snapshot
from libdsec.cli.common import Json, client, emit, run, size, table

MADE = ("id", "state", "node")
SHOWN_MAX = 20
"""Removed things that are shown to a person."""

Id = Annotated[str, typer.Argument(metavar="SANDBOX")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("pack-diff")(pack_diff)
    app.command("snapshot")(snapshot)
    app.command("restore")(restore)
    app.command("fork")(fork)


def pack_diff(
    id: Id,
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]")],
    scrub: Annotated[bool, typer.Option(help="Leave out histories, credentials, caches …")] = True,
    remove: Annotated[list[str] | None, typer.Option(help="A path to leave out.")] = None,
    as_json: Json = False,
) -> None:
    """Packs what a sandbox changed as an image over its own layers."""

    async def work() -> None:
        async with client() as c:
            made = await (await c.get(id)).pack_diff(name, scrub=scrub, remove=remove or ())
        _show(made, as_json=as_json)
        if as_json:
            return
        for one in made.removed[:SHOWN_MAX]:
            print(f"removed {one.path} ({one.rule})")
        if made.removed_count > SHOWN_MAX:
            print(f"removed {made.removed_count - SHOWN_MAX} more")

    run(work, as_json=as_json)


def snapshot(id: Id, as_json: Json = False) -> None:
    """Keeps a sandbox's disk as it is now."""

    async def work() -> None:
        async with client() as c:
            made = await (await c.get(id)).snapshot()
        _show(made, as_json=as_json)

    run(work, as_json=as_json)


def restore(
    name: Annotated[str, typer.Argument(metavar="SNAPSHOT")],
    n: Annotated[int, typer.Option("--count", "-n", help="How many.")] = 1,
    job: Annotated[str | None, typer.Option("--job", help="The job they belong to.")] = None,
    as_json: Json = False,
) -> None:
    """Makes new sandboxes with the disk of a snapshot."""

    async def work() -> None:
        async with client() as c:
            made = await c.restore(name, n, job=job)
        _list(made if isinstance(made, list) else [made], as_json=as_json)

    run(work, as_json=as_json)


def fork(
    id: Id,
    n: Annotated[int, typer.Argument(metavar="COUNT")] = 1,
    as_json: Json = False,
) -> None:
    """Makes branches of a sandbox on its node."""

    async def work() -> None:
        async with client() as c:
            made = await (await c.get(id)).fork(n)
        _list(made, as_json=as_json)

    run(work, as_json=as_json)


def _show(made: Layer | Snapshot, *, as_json: bool) -> None:
    if as_json:
        emit(msgspec.to_builtins(made))
        return
    row = {
        "name": made.name, "size": size(made.size_bytes), "digest": made.digest[:12],
        "frozen": f"{made.frozen_s * 1e3:.1f} ms",
    }  # fmt: skip
    table([row], tuple(row), as_json=False)


def _list(made: list[Sandbox], *, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [{"id": s.id, "state": s.state, "node": s.node} for s in made]
    table(rows, MADE, as_json=as_json)
