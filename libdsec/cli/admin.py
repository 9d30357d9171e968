"""``dsec project|key|grant|quota|node|logs``."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from libdsec._ids import uid_of
from libdsec.cli.common import Aliases, Json, client, emit, run, table

projects = typer.Typer(no_args_is_help=True, cls=Aliases)
keys = typer.Typer(no_args_is_help=True, cls=Aliases)
grants = typer.Typer(no_args_is_help=True, cls=Aliases)
quotas = typer.Typer(no_args_is_help=True, cls=Aliases)
nodes = typer.Typer(no_args_is_help=True, cls=Aliases)

Of = Annotated[str | None, typer.Option("--of", metavar="PROJECT", help="Default: ours.")]
Grants = Annotated[list[str], typer.Argument(metavar="ENTITY.VERB…")]
PROJECT_COLUMNS = ("id", "name", "parent", "path")
KEY_COLUMNS = ("id", "principal", "name", "kind", "project", "grants", "revoked")
NODE_COLUMNS = ("id", "state", "pool", "sandboxes", "cores", "memory_mb", "backends")
LOG_COLUMNS = ("at", "principal", "verb", "outcome", "bytes")


def _rows(items: Any) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(item) for item in items]


@projects.command("create")
def create_project(
    name: Annotated[str, typer.Argument()],
    parent: Annotated[str | None, typer.Option(help="Default: ours.")] = None,
    id: Annotated[str | None, typer.Option(help="Default: made of the name.")] = None,
    as_json: Json = False,
) -> None:
    """Makes a project below another."""

    async def work() -> None:
        async with client() as c:
            made = await c.projects.create(name, parent=parent, id=id)
        table(_rows([made]), PROJECT_COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@projects.command("list")
def list_projects(as_json: Json = False) -> None:
    """Lists our project and all below it."""

    async def work() -> None:
        async with client() as c:
            table(_rows(await c.projects.list()), PROJECT_COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@projects.command("delete")
def delete_project(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Removes an empty project."""

    async def work() -> None:
        async with client() as c:
            await c.projects.delete(id)
        _deleted(id, as_json=as_json)

    run(work, as_json=as_json)


def _deleted(id: str, *, as_json: bool) -> None:
    if as_json:
        emit({"deleted": id})


@keys.command("create")
def create_key(
    given: Annotated[list[str] | None, typer.Argument(metavar="ENTITY.VERB…")] = None,
    name: Annotated[str, typer.Option()] = "key",
    of: Of = None,
    kind: Annotated[str, typer.Option(help="user, service, agent or node")] = "user",
    node: Annotated[str | None, typer.Option(help="The node, of a node's key.")] = None,
    expires_in_s: Annotated[float | None, typer.Option()] = None,
    as_json: Json = False,
) -> None:
    """Makes a key. Its secret is printed this once."""

    async def work() -> None:
        async with client() as c:
            made = await c.keys.create(
                name,
                project=of,
                grants=given or (),
                kind=kind,  # type: ignore[arg-type]
                node=node,
                expires_in_s=expires_in_s,
            )
        if as_json:
            emit(made)
        else:
            print(made.secret)

    run(work, as_json=as_json)


@keys.command("list")
def list_keys(of: Of = None, as_json: Json = False) -> None:
    """Lists keys."""

    async def work() -> None:
        async with client() as c:
            table(_rows(await c.keys.list(project=of)), KEY_COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@keys.command("delete")
def delete_key(id: Annotated[str, typer.Argument()], of: Of = None, as_json: Json = False) -> None:
    """Revokes a key."""

    async def work() -> None:
        async with client() as c:
            await c.keys.delete(id, project=of)
        _deleted(id, as_json=as_json)

    run(work, as_json=as_json)


@grants.command("create")
def create_grant(
    principal: Annotated[str, typer.Argument()],
    given: Grants,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Gives grants; only those you hold."""

    _change_grants("create", principal, given, of, as_json=as_json, told="granted")


@grants.command("list")
def list_grants(
    principal: Annotated[str | None, typer.Argument()] = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Lists a principal's grants; ours by default."""

    async def work() -> None:
        async with client() as c:
            found = await c.grants.list(principal=principal, project=of)
        table([{"grant": g} for g in found], ("grant",), as_json=as_json)

    run(work, as_json=as_json)


@grants.command("delete")
def delete_grant(
    principal: Annotated[str, typer.Argument()],
    given: Grants,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Takes grants back."""

    _change_grants("delete", principal, given, of, as_json=as_json, told="taken")


def _change_grants(
    verb: str, principal: str, given: list[str], of: str | None, *, as_json: bool, told: str
) -> None:
    async def work() -> None:
        async with client() as c:
            await getattr(c.grants, verb)(principal, given, project=of)
        if as_json:
            emit({"principal": principal, told: given})

    run(work, as_json=as_json)


@quotas.command("get")
def get_quota(
    project: Annotated[str | None, typer.Argument()] = None, as_json: Json = False
) -> None:
    """Shows limits and use of a project; ours by default."""

    async def work() -> None:
        async with client() as c:
            quota = await c.quotas.get(project)
        if as_json:
            emit(quota)
            return
        names = ("sandboxes", "cores", "memory_mb", "creations_per_s")
        limit, used = quota.limit, quota.used
        rows = [
            {"of": n, "used": getattr(used, n, None), "limit": getattr(limit, n)} for n in names
        ]
        table(rows, ("of", "used", "limit"), as_json=False)

    run(work, as_json=as_json)


@quotas.command("create")
def create_quota(
    project: Annotated[str, typer.Argument()],
    sandboxes: Annotated[int | None, typer.Option()] = None,
    cores: Annotated[float | None, typer.Option()] = None,
    memory_mb: Annotated[int | None, typer.Option("--memory-mb")] = None,
    creations_per_s: Annotated[float | None, typer.Option()] = None,
    as_json: Json = False,
) -> None:
    """Sets the limits of a project; those left out are none."""

    async def work() -> None:
        async with client() as c:
            made = await c.quotas.create(
                project=project,
                sandboxes=sandboxes,
                cores=cores,
                memory_mb=memory_mb,
                creations_per_s=creations_per_s,
            )
        if as_json:
            emit(made)

    run(work, as_json=as_json)


@nodes.command("list")
def list_nodes(as_json: Json = False) -> None:
    """Lists nodes with what their probes found."""

    async def work() -> None:
        async with client() as c:
            found = await c.nodes.list()
        if as_json:
            emit(_rows(found))
        else:
            table([_node(n) for n in found], NODE_COLUMNS, as_json=False)

    run(work, as_json=as_json)


def _node(node: Any) -> dict[str, Any]:
    held, room = node.committed, node.capacity
    return {
        "id": node.id,
        "state": node.state,
        "pool": node.pool,
        "sandboxes": held.sandboxes,
        "cores": f"{held.cores:g}/{room.cores:g}",
        "memory_mb": f"{held.memory_mb}/{room.memory_mb}",
        "backends": [name for name, status in node.backends.items() if status.supported],
    }


@nodes.command("get")
def get_node(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Shows what a node can do, and why not."""

    async def work() -> None:
        async with client() as c:
            node = await c.nodes.get(id)
        if as_json:
            emit(node)
            return
        rows = []
        for name, backend in node.backends.items():
            rows.append({"what": name, "ok": backend.supported, "reason": backend.reason})
            rows += [
                {"what": f"{name}.{n}", "ok": f.supported, "reason": f.reason}
                for n, f in backend.features.items()
            ]
        table(rows, ("what", "ok", "reason"), as_json=False)

    run(work, as_json=as_json)


def _node_command(verb: str, id: str, *, as_json: bool) -> None:
    async def work() -> None:
        async with client() as c:
            await getattr(c.nodes, verb)(id)
        if as_json:
            emit({"node": id, "done": verb})

    run(work, as_json=as_json)


@nodes.command()
def cordon(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """No new sandboxes on a node."""
    _node_command("cordon", id, as_json=as_json)


@nodes.command()
def uncordon(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """New sandboxes on a node again."""
    _node_command("uncordon", id, as_json=as_json)


@nodes.command()
def drain(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """No new sandboxes on a node, and those there end."""
    _node_command("drain", id, as_json=as_json)


def logs(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX")],
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 200,
    as_json: Json = False,
) -> None:
    """Shows what was done in a sandbox and how each call ended, oldest first. The record
    holds who, what and when, no payloads."""

    async def work() -> None:
        async with client() as c:
            found = c.audit.list(kind="access", target=uid_of(sandbox), limit=limit)
            entries = [entry async for entry in found]
        rows = [{"seq": e.seq, **e.record} for e in reversed(entries)]
        table(rows, LOG_COLUMNS, as_json=as_json)

    run(work, as_json=as_json)
