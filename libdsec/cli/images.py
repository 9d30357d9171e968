"""``dsec image``, ``dsec workspace``, ``dsec toolkit``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
import typer

from libdsec.cli.common import Aliases, Json, client, emit, run, size, table
from libdsec.images import OnProgress


class _Images(Aliases):
    """Also takes ``inspect`` for ``get``."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name or of its other form."""
        return super().get_command(ctx, {"inspect": "get"}.get(cmd_name, cmd_name))


app = typer.Typer(no_args_is_help=True, cls=_Images)
workspaces = typer.Typer(no_args_is_help=True, cls=_Images)
toolkits = typer.Typer(no_args_is_help=True, cls=_Images)
COLUMNS = ("name", "kind", "size", "layers", "project")
SCHEMES = ("oci", "git", "docker", "registry")

Name = Annotated[str, typer.Argument(metavar="NAME[:TAG]")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A directory, layer tar, docker-save archive or OCI layout; or oci:PATH, "
        "git:REPOSITORY, docker:IMAGE (of the service's engine), registry:HOST/REPO[:TAG].",
    ),
]
Prefix = Annotated[str | None, typer.Option(help="Where it lands in the sandbox.")]
Commit = Annotated[str | None, typer.Option(help="With git: the commit; default HEAD.")]
Reference = Annotated[str | None, typer.Option(help="Chooses one image of an archive.")]
Server = Annotated[
    bool, typer.Option("--server", help="SOURCE is on the image service's machine.")
]


@app.command("import")
def import_image(
    name: Name,
    source: Source,
    kind: Annotated[str, typer.Option(help="base, workspace or toolkit")] = "base",
    prefix: Prefix = None,
    commit: Commit = None,
    reference: Reference = None,
    server: Server = False,
    as_json: Json = False,
) -> None:
    """Registers an image from local files, a registry or an engine."""
    facts = _source(source, server) | {"commit": commit, "reference": reference}
    _create(name, as_json=as_json, kind=kind, prefix=prefix, **facts)


@app.command()
def build(
    name: Name,
    context: Annotated[str, typer.Argument(metavar="CONTEXT")] = ".",
    file: Annotated[
        str | None, typer.Option("--file", "-f", help="Default: CONTEXT/Dockerfile.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Build up to this stage.")] = None,
    server: Server = False,
    as_json: Json = False,
) -> None:
    """Has a Dockerfile built beside the image service, and registers the image."""
    dockerfile = file or f"{context.rstrip('/')}/Dockerfile"
    _create(
        name, as_json=as_json, dockerfile=dockerfile, context=context, target=target,
        upload=not server,
    )  # fmt: skip


def _publish(kind: str) -> Any:
    def publish(
        name: Name,
        source: Source,
        prefix: Prefix = None,
        commit: Commit = None,
        server: Server = False,
        as_json: Json = False,
    ) -> None:
        facts = _source(source, server) | {"commit": commit}
        _create(name, as_json=as_json, kind=kind, prefix=prefix, **facts)

    publish.__doc__ = f"Registers a version of a {kind}; SOURCE as for `image import`."
    return publish


workspaces.command("publish")(_publish("workspace"))
toolkits.command("publish")(_publish("toolkit"))


def _source(source: str, server: bool) -> dict[str, Any]:
    scheme, colon, rest = source.partition(":")
    if not colon or scheme not in SCHEMES:
        return {"path": source, "upload": not server}
    if scheme in ("docker", "registry") and server:
        raise typer.BadParameter(f"--server does not go with {scheme}:")
    return {scheme: rest, "upload": scheme in ("oci", "git") and not server}


def _create(name: str, *, as_json: bool, **facts: Any) -> None:
    async def work() -> None:
        async with client() as c:
            with progress(quiet=as_json) as report:
                image = await c.images.create(name, on_progress=report, **facts)
        if as_json:
            emit(image)
        else:
            _show([image], as_json=False)

    run(work, as_json=as_json)


@contextmanager
def progress(*, quiet: bool) -> Iterator[OnProgress]:
    """A bar on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _share, _stage: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("image", total=1.0)
        yield lambda share, stage: bar.update(task, completed=share, description=stage)


def _list(default: str | None) -> Any:
    def list_images(
        kind: Annotated[str | None, typer.Option(help="base, workspace or toolkit")] = default,
        as_json: Json = False,
    ) -> None:
        """Lists what the project and those above it have."""

        async def work() -> None:
            async with client() as c:
                _show(await c.images.list(kind=kind), as_json=as_json)

        run(work, as_json=as_json)

    return list_images


app.command("list")(_list(None))
workspaces.command("list")(_list("workspace"))
toolkits.command("list")(_list("toolkit"))


@app.command()
def get(name: Name, as_json: Json = False) -> None:
    """Shows one image: its layers and defaults."""

    async def work() -> None:
        async with client() as c:
            image = await c.images.get(name)
        if as_json:
            emit(image)
            return
        _show([image], as_json=False)
        for layer in image.layers:
            print(f"  {layer.digest}  {size(layer.size_bytes)}")

    run(work, as_json=as_json)


@app.command()
def tag(
    name: Name,
    target: Annotated[str, typer.Argument(metavar="NAME[:TAG]")],
    as_json: Json = False,
) -> None:
    """Has a second name mean what the first means now."""

    async def work() -> None:
        async with client() as c:
            image = await c.images.tag(name, target)
        if as_json:
            emit(image)

    run(work, as_json=as_json)


@app.command()
def export(
    names: Annotated[list[str], typer.Argument(metavar="NAME[:TAG]…")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE")],
    as_json: Json = False,
) -> None:
    """Writes an image, or several as one environment, as an archive: an OCI layout that
    `docker load` takes, too."""

    async def work() -> None:
        async with client() as c:
            with progress(quiet=as_json) as report:
                written = await c.images.export(names, output, on_progress=report)
        if as_json:
            emit({"path": output, "size_bytes": written})

    run(work, as_json=as_json)


@app.command()
def delete(name: Name, as_json: Json = False) -> None:
    """Removes an image."""

    async def work() -> None:
        async with client() as c:
            await c.images.delete(name)
        if as_json:
            emit({"deleted": name})

    run(work, as_json=as_json)


@app.command("hot-set")
def hot_set(
    share: Annotated[float, typer.Option(help="Of all sandboxes, from 0 to 1.")] = 0.8,
    days: Annotated[float, typer.Option(help="How far to look back.")] = 7.0,
    as_json: Json = False,
) -> None:
    """Shows the smallest set of layers that serves most sandboxes."""

    async def work() -> None:
        async with client() as c:
            found = await c.images.hot_set(share=share, since_s=days * 86_400)
        if as_json:
            emit(found)
            return
        rows = [
            {
                "layer": layer.digest[:16], "size": size(layer.size_bytes),
                "read": size(layer.hot_bytes) if layer.unit_bytes else "not traced",
            }
            for layer in found.layers
        ]  # fmt: skip
        table(rows, ("layer", "size", "read"), as_json=False)
        print(
            f"{found.share:.0%} of the sandboxes ({found.sandboxes}): "
            f"{size(found.hot_bytes)} of {size(found.size_bytes)}"
        )

    run(work, as_json=as_json)


for group in (workspaces, toolkits):
    group.command("get")(get)
    group.command("tag")(tag)
    group.command("delete")(delete)


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
