"""What all commands share: options, running, output, errors.

Owns: the connection's options, the translation of errors to exit codes, tables and
JSON. Does not own: any command.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import msgspec
import typer
import typer.core

from libdsec import DSecClient, DSecError, ExecResult, InvalidRequest

TIMED_OUT = 124
FAILED = 125
INTERRUPTED = 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Labels = Annotated[
    list[str] | None, typer.Option("--label", "-l", metavar="KEY=VALUE", help="May be repeated.")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID…", show_default=False)]


class Aliases(typer.core.TyperGroup):
    """A group that also takes ``ls`` for ``list`` and ``rm`` for ``delete``."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name or of its short form."""
        return super().get_command(ctx, {"ls": "list", "rm": "delete"}.get(cmd_name, cmd_name))


@dataclass
class Connection:
    """Options of the connection, given before the command."""

    url: str | None = None
    api_key: str | None = None
    project: str | None = None


connection = Connection()


def client(*, keep: bool = True) -> DSecClient:
    """A client as the options say; sandboxes outlive it unless ``keep`` is false."""
    return DSecClient(connection.url, connection.api_key, connection.project, keep=keep)


def run(work: Callable[[], Coroutine[Any, Any, int | None]], *, as_json: bool = False) -> None:
    """Runs a command and exits: its code, or 125 with the error on stderr."""
    try:
        code = asyncio.run(work()) or 0
    except DSecError as exc:
        fail(exc, as_json=as_json)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        leave(FAILED)
    else:
        leave(code)


def exit_code(result: ExecResult) -> int:
    """The command's own, or 124 for a time-out."""
    if result.timed_out:
        return TIMED_OUT
    return 1 if result.exit_code is None else result.exit_code


def fail(error: DSecError, *, as_json: bool) -> None:
    """Prints an error and exits with 125."""
    if as_json:
        names = ("code", "message", "field", "retryable", "is_infra", "cause", "retry_after_s")
        facts = {name: getattr(error, name) for name in names}
        print(json.dumps({"error": facts}), file=sys.stderr)
    else:
        print(f"dsec: {error}", file=sys.stderr)
    leave(FAILED)


def leave(code: int) -> None:
    """Ends the process now: a thread that waits for input must not hold it."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        pass
    os._exit(code)


def pairs(values: Iterable[str] | None, name: str) -> dict[str, str]:
    """``KEY=VALUE`` options as a mapping. Raises ``InvalidRequest``."""
    found = {}
    for value in values or ():
        key, sign, rest = value.partition("=")
        if not sign or not key:
            raise InvalidRequest(f"{value!r} is not KEY=VALUE", field=name)
        found[key] = rest
    return found


def emit(value: Any) -> None:
    """One value as JSON on stdout."""
    print(json.dumps(msgspec.to_builtins(value, enc_hook=str), indent=1, ensure_ascii=False))


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str], *, as_json: bool) -> None:
    """Rows as JSON, as a table on a terminal, else with tabs between."""
    if as_json:
        emit([dict(row) for row in rows])
        return
    cells = [[of_column(column, row.get(column)) for column in columns] for row in rows]
    if not sys.stdout.isatty():
        for line in ([c.upper() for c in columns], *cells):
            print("\t".join(line))
        return
    from rich.console import Console

    Console().print(rich_table(cells, columns))


def facts(value: Mapping[str, Any]) -> None:
    """What is known of one thing, a line a fact; what is not is left out."""
    lines: dict[str, Any] = {}
    for name, fact in value.items():
        inner = fact if isinstance(fact, Mapping) else {}
        lines |= {f"{name}.{key}": v for key, v in inner.items()} or {name: fact}
    rows = [
        {"name": name, "value": of_column(name, fact)}
        for name, fact in lines.items() if fact not in (None, "", {}, [])
    ]  # fmt: skip
    table(rows, ("name", "value"), as_json=False)


def rich_table(cells: Sequence[Sequence[str]], columns: Sequence[str]) -> Any:
    """A table for a terminal."""
    from rich.markup import escape
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column.upper(), overflow="fold")
    for line in cells:
        made.add_row(*(escape(cell) for cell in line))
    return made


def of_column(column: str, value: Any) -> str:
    """A value as people read it: times where the column is about one."""
    if isinstance(value, float) and (column == "at" or column.endswith("_at")):
        return datetime.fromtimestamp(value).isoformat(" ", "milliseconds")
    return _cell(value)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ",".join(f"{k}={_cell(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ",".join(_cell(v) for v in value) or "-"
    return str(value)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
