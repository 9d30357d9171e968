"""``dsec secret``."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import msgspec
import typer

from libdsec.cli.common import Aliases, Json, client, emit, run, table

app = typer.Typer(no_args_is_help=True, cls=Aliases)

COLUMNS = ("name", "version", "hosts", "plain", "changed_by")
Name = Annotated[str, typer.Argument()]
Of = Annotated[str | None, typer.Option("--of", metavar="PROJECT", help="Default: ours.")]


@app.command("set")
def set_secret(
    name: Name,
    hosts: Annotated[list[str], typer.Argument(metavar="HOST…", help="Where it may ever go.")],
    plain: Annotated[bool, typer.Option("--plain", help="Also over HTTP without TLS.")] = False,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Keeps a value, which is read from standard input: arguments are seen by others."""
    value = _typed() if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")

    async def work() -> None:
        async with client() as c:
            made = await c.secrets.set(name, value, hosts=hosts, plain=plain, project=of)
        if as_json:
            emit(made)
        else:
            print(f"{made.name} version {made.version}")

    run(work, as_json=as_json)


def _typed() -> str:
    return str(typer.prompt("value", hide_input=True, err=True))


@app.command("list")
def list_secrets(of: Of = None, as_json: Json = False) -> None:
    """Lists secrets, without their values."""

    async def work() -> None:
        async with client() as c:
            found = await c.secrets.list(project=of)
        rows: list[dict[str, Any]] = [msgspec.to_builtins(each) for each in found]
        table(rows, COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@app.command("remove")
def remove_secret(name: Name, of: Of = None, as_json: Json = False) -> None:
    """Forgets a secret."""

    async def work() -> None:
        async with client() as c:
            await c.secrets.remove(name, project=of)
        if as_json:
            emit({"removed": name})

    run(work, as_json=as_json)
