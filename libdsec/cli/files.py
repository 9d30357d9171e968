"""``dsec cp`` and ``ls``."""

from __future__ import annotations

import os
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
PIPE = "-"
PIPE_BYTES = 256 * 1024

Advance = Callable[[int], None]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", "-x", metavar="PATTERN", help="Of a directory. May be repeated."),
]
OutsideLinks = Annotated[
    str, typer.Option(help="Links out of a directory to this machine: refuse, skip or keep.")
]


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
    source: Annotated[str, typer.Argument(help="PATH, ID:PATH or - (standard input)")],
    target: Annotated[str, typer.Argument(help="PATH, ID:PATH or - (standard output)")],
    user: Annotated[str | None, typer.Option("--user", "-u")] = None,
    exclude: Exclude = None,
    outside_links: OutsideLinks = "refuse",
    as_json: Json = False,
) -> None:
    """Copies a file or a directory's content into or out of a sandbox."""

    async def work() -> None:
        (from_id, from_path), (to_id, to_path) = split(source), split(target)
        if (from_id is None) == (to_id is None):
            raise InvalidRequest("exactly one of the two is ID:PATH", field="source")
        if outside_links not in ("refuse", "skip", "keep"):
            raise InvalidRequest("refuse, skip or keep", field="outside_links")
        async with client() as c:
            files = (await c.get(from_id or to_id or "")).files
            with progress(quiet=as_json) as advance:
                how = Copy(files, user, exclude or [], outside_links, advance)
                if to_id is not None:
                    count = await how.up(from_path, to_path)
                else:
                    count = await how.down(from_path, to_path)
        if as_json and target != PIPE:
            emit({"source": source, "target": target, "bytes": count})

    run(work, as_json=as_json)


class Copy:
    """One copy; its methods give the bytes."""

    def __init__(
        self, files: Files, user: str | None, exclude: list[str], outside_links: str,
        advance: Advance,
    ) -> None:  # fmt: skip
        self._files, self._user, self._advance = files, user, advance
        self._exclude, self._outside = exclude, outside_links

    async def up(self, local: str, remote: str) -> int:
        """Into the sandbox."""
        if local == PIPE:
            return await self._files.write(remote, _input(self._advance), user=self._user)
        path = Path(local)
        if not path.exists():
            raise InvalidRequest(f"{path}: no such file", field="source")
        if path.is_dir():
            done = await self._files.upload_tree(
                path, remote, user=self._user, exclude=self._exclude, on_progress=self._advance
            )
            return done.bytes
        if remote.endswith(("/", ".")):
            remote = f"{remote.rstrip('/')}/{path.name}"
        return await self._files.upload(
            path, remote, user=self._user, on_progress=self._advance
        )

    async def down(self, remote: str, local: str) -> int:
        """Out of the sandbox."""
        if local == PIPE:
            return await self._to_output(remote)
        path = Path(local)
        if (await self._files.stat(remote, user=self._user)).is_dir:
            done = await self._files.download_tree(
                remote, path, user=self._user, exclude=self._exclude,
                outside_links=self._outside, on_progress=self._advance,  # type: ignore[arg-type]
            )  # fmt: skip
            for name in done.left_out:
                print(f"dsec: {remote}/{name}: a link to outside, left out", file=sys.stderr)
            return done.bytes
        if path.is_dir():
            path = path / Path(remote).name
        return await self._files.download(
            remote, path, user=self._user, on_progress=self._advance
        )

    async def _to_output(self, remote: str) -> int:
        count = 0
        async for data in self._files.stream(remote, user=self._user):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
            count += len(data)
            self._advance(len(data))
        return count


def _input(advance: Advance) -> Iterator[bytes]:
    while data := os.read(sys.stdin.fileno(), PIPE_BYTES):
        yield data
        advance(len(data))


@contextmanager
def progress(*, quiet: bool) -> Iterator[Advance]:
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
