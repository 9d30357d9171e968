"""``dsec trajectory``: what was done in a sandbox."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
import typer

from libdsec import TrajectoryRecord
from libdsec.cli.common import client, run, table

COLUMNS = ("seq", "at", "duration_s", "end", "lane", "step", "command")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("trajectory")(trajectory)


def trajectory(
    id: Annotated[str, typer.Argument(metavar="ID")],
    changed: Annotated[
        str | None, typer.Option(metavar="PATH", help="Only what may have changed a file last.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="With all of long outputs, not head and tail alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON Lines.")] = False,
) -> None:
    """Lists what was done in a sandbox, also in one that is over: oldest first."""

    async def work() -> None:
        async with client() as c:
            log = (await c.get(id)).trajectory()
            if changed is None:
                records = [
                    _shown(await log.whole(r) if whole else r, as_json=as_json) async for r in log
                ]
            else:
                found = await log.changed(changed)
                records = [_shown(r, as_json=as_json) for r in found.candidates]
        if not as_json:
            table(records, COLUMNS, as_json=False)

    run(work, as_json=as_json)


def _shown(record: TrajectoryRecord, *, as_json: bool) -> dict[str, Any]:
    """A row of the table; a line of JSON is printed at once."""
    if as_json:
        print(json.dumps(msgspec.to_builtins(record.to_json()), ensure_ascii=False))
        return {}
    taken_s = None if record.ended_at is None else round(record.ended_at - record.at, 3)
    command = record.command or f"{record.missing} operations without a record"
    return {
        "seq": record.seq, "at": record.at or None, "duration_s": taken_s, "end": _end(record),
        "lane": record.lane, "step": record.step, "command": command,
    }  # fmt: skip


def _end(record: TrajectoryRecord) -> str:
    if record.error is not None:
        return record.error.code
    if record.result is None:
        return record.state
    return "timed out" if record.result.timed_out else str(record.result.exit_code)
