"""``dsec image``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from libdsec.cli.common import Aliases, Json, client, emit, run, size, table
from libdsec.managers import OnProgress

app = typer.Typer(no_args_is_help=True, cls=Aliases)
COLUMNS = ("name", "kind", "size", "layers", "project")


@app.command()
def create(
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]")],
    path: Annotated[str | None, typer.Option(help="Directory, tar or docker-save file.")] = None,
    docker: Annotated[str | None, typer.Option(help="A local Docker image.")] = None,
    kind: Annotated[str, typer.Option(help="base, workspace or toolkit")] = "base",
    prefix: Annotated[str | None, typer.Option(help="Where it lands in the sandbox.")] = None,
    as_json: Json = False,
) -> None:
    """Registers an image. Paths are those of the image service's machine."""

    async def work() -> None:
        async with client() as c:
            with _progress(quiet=as_json) as report:
                image = await c.images.create(
                    name,
                    path=path,
                    docker=docker,
                    kind=kind,  # type: ignore[arg-type]
                    prefix=prefix,
                    on_progress=report,
                )
        _show([image], as_json=as_json)

    run(work, as_json=as_json)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[OnProgress]:
    """A bar on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _share, _stage: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("import", total=1.0)
        yield lambda share, stage: bar.update(task, completed=share, description=stage)


@app.command("list")
def list_images(
    kind: Annotated[str | None, typer.Option(help="base, workspace or toolkit")] = None,
    as_json: Json = False,
) -> None:
    """Lists images of the project and those above it."""

    async def work() -> None:
        async with client() as c:
            _show(await c.images.list(kind=kind), as_json=as_json)

    run(work, as_json=as_json)


@app.command()
def get(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Shows one image."""

    async def work() -> None:
        async with client() as c:
            image = await c.images.get(name)
        if as_json:
            emit(image)
        else:
            _show([image], as_json=False)

    run(work, as_json=as_json)


@app.command()
def delete(name: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Removes an image."""

    async def work() -> None:
        async with client() as c:
            await c.images.delete(name)
        if as_json:
            emit({"deleted": name})

    run(work, as_json=as_json)


def _show(images: Any, *, as_json: bool) -> None:
    if as_json:
        emit([msgspec.to_builtins(image) for image in images])
        return
    rows = [
        {
            "name": i.name, "kind": i.kind, "size": size(i.size_bytes),
            "layers": len(i.layers), "project": i.project,
        }
        for i in images
    ]  # fmt: skip
    table(rows, COLUMNS, as_json=False)
