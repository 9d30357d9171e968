"""``dsec cp`` and ``ls``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from libdsec import Files, InvalidRequest
from libdsec.cli.common import Json, client, emit, run, size, table

COLUMNS = ("type", "mode", "size", "path")


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("cp")(copy)
    app.command("ls")(list_files)


def split(text: str) -> tuple[str | None, str]:
    """``ID:PATH`` or a local path."""
    id, sign, path = text.partition(":")
    if sign and "/" not in id:
        return id, path or "."
    return None, text


def copy(
    source: Annotated[str, typer.Argument(help="PATH or ID:PATH")],
    target: Annotated[str, typer.Argument(help="PATH or ID:PATH")],
    user: Annotated[str | None, typer.Option("--user", "-u")] = None,
    as_json: Json = False,
) -> None:
    """Copies a file or a directory into or out of a sandbox."""

    async def work() -> None:
        (from_id, from_path), (to_id, to_path) = split(source), split(target)
        if (from_id is None) == (to_id is None):
            raise InvalidRequest("exactly one of the two is ID:PATH", field="source")
        async with client() as c:
            files = (await c.get(from_id or to_id or "")).files
            with progress(quiet=as_json) as advance:
                if to_id is not None:
                    count = await _up(files, Path(from_path), to_path, user, advance)
                else:
                    count = await _down(files, from_path, Path(to_path), user, advance)
        if as_json:
            emit({"source": source, "target": target, "bytes": count})

    run(work, as_json=as_json)


async def _up(
    files: Files, local: Path, remote: str, user: str | None, advance: Callable[[int], None]
) -> int:
    if not local.exists():
        raise InvalidRequest(f"{local}: no such file", field="source")
    if local.is_dir():
        return await files.upload_tree(local, remote, user=user, progress=advance)
    if remote.endswith(("/", ".")):
        remote = f"{remote.rstrip('/')}/{local.name}"
    return await files.upload(local, remote, user=user, progress=advance)


async def _down(
    files: Files, remote: str, local: Path, user: str | None, advance: Callable[[int], None]
) -> int:
    if (await files.stat(remote, user=user)).is_dir:
        return await files.download_tree(remote, local, user=user, progress=advance)
    if local.is_dir():
        local = local / Path(remote).name
    return await files.download(remote, local, user=user, progress=advance)


@contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal; nothing elsewhere."""
    if quiet or not sys.stderr.isatty():
        yield lambda _count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("copy", total=None)
        yield lambda count: bar.advance(task, count)


def list_files(
    place: Annotated[str, typer.Argument(metavar="ID[:PATH]")],
    recursive: Annotated[bool, typer.Option("--recursive", "-R")] = False,
    user: Annotated[str | None, typer.Option("--user", "-u")] = None,
    as_json: Json = False,
) -> None:
    """Lists a directory of a sandbox."""

    async def work() -> None:
        id, path = split(place if ":" in place else f"{place}:.")
        if id is None:
            raise InvalidRequest("expected ID[:PATH]", field="place")
        async with client() as c:
            files = (await c.get(id)).files
            entries = await files.list(path, recursive=recursive, user=user)
        if as_json:
            emit([asdict(entry) for entry in entries])
            return
        rows = [
            {"type": e.type, "mode": f"{e.mode:04o}", "size": size(e.size), "path": e.path}
            for e in entries
        ]
        table(rows, COLUMNS, as_json=False)

    run(work, as_json=as_json)
