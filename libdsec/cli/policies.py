"""``dsec policy``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from libdsec import InvalidRequest
from libdsec.cli.common import Aliases, Json, client, emit, run, table

app = typer.Typer(no_args_is_help=True, cls=Aliases)

COLUMNS = ("name", "version", "project", "created_by")
Name = Annotated[str, typer.Argument(metavar="NAME[:VERSION]")]
Of = Annotated[str | None, typer.Option("--of", metavar="PROJECT", help="Default: ours.")]


@app.command()
def create(
    name: Annotated[str, typer.Argument()],
    file: Annotated[Path, typer.Argument(help="The document as JSON; - is standard input.")],
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Keeps a policy document as the next version of a name."""

    async def work() -> None:
        document = read_document(file)
        async with client() as c:
            made = await c.policies.create(name, document, project=of)
        if as_json:
            emit(made)
        else:
            print(f"{made.name}:{made.version}")

    run(work, as_json=as_json)


def policy_of(given: str) -> str | dict[str, Any]:
    """A name as it is, the document of ``@FILE``. Raises ``InvalidRequest``."""
    return read_document(Path(given[1:])) if given.startswith("@") else given


def read_document(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text())
    except (OSError, ValueError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidRequest(f"{file}: {why}", field="document") from exc
    if not isinstance(read, dict):
        raise InvalidRequest(f"{file}: not a JSON object", field="document")
    return read


@app.command()
def get(name: Name, of: Of = None) -> None:
    """Prints a policy document as JSON."""

    async def work() -> None:
        async with client() as c:
            found = await c.policies.get(name, project=of)
        emit(found.document)

    run(work)


@app.command("list")
def list_policies(of: Of = None, as_json: Json = False) -> None:
    """Lists the newest version of each policy."""

    async def work() -> None:
        async with client() as c:
            found = await c.policies.list(project=of)
        rows = [msgspec.to_builtins(each) for each in found]
        table(rows, COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@app.command()
def delete(
    name: Annotated[str, typer.Argument()],
    version: Annotated[int | None, typer.Option(help="Default: all.")] = None,
    of: Of = None,
    as_json: Json = False,
) -> None:
    """Forgets a policy; sandboxes keep what they were started with."""

    async def work() -> None:
        async with client() as c:
            await c.policies.delete(name, version=version, project=of)
        if as_json:
            emit({"deleted": name})

    run(work, as_json=as_json)


@app.command("set")
def set_policy(
    sandbox: Annotated[str, typer.Argument(metavar="SANDBOX")],
    name: Annotated[str, typer.Argument(metavar="NAME[:VERSION]|@FILE")],
    as_json: Json = False,
) -> None:
    """Puts a policy into force in a running sandbox, and says what enforces it."""

    async def work() -> None:
        policy = policy_of(name)
        async with client() as c:
            told = await (await c.get(sandbox)).set_policy(policy)
        rows = [{"rule": rule, "mechanism": how} for rule, how in sorted(told.items())]
        table(rows, ("rule", "mechanism"), as_json=as_json)

    run(work, as_json=as_json)
