"""``dsec job``: jobs, and everything that belongs to one at once."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from libdsec.cli.common import Aliases, Json, client, run, table
from libdsec.cli.sandboxes import outcomes

app = typer.Typer(no_args_is_help=True, cls=Aliases)

Id = Annotated[str, typer.Argument(metavar="JOB")]
COLUMNS = ("job", "state", "epoch", "lease_until", "on_lost", "sandboxes")


@app.command("list")
def list_jobs(as_json: Json = False) -> None:
    """Lists the project's jobs, with their live sandboxes by state."""

    async def work() -> None:
        async with client() as c:
            found = [msgspec.to_builtins(job) async for job in c.jobs.list()]
        table(found, COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


@app.command("pause")
def pause(id: Id, as_json: Json = False) -> None:
    """Pauses all sandboxes of a job."""
    _all("pause", id, as_json=as_json)


@app.command("resume")
def resume(id: Id, as_json: Json = False) -> None:
    """Resumes all sandboxes of a job."""
    _all("resume", id, as_json=as_json)


@app.command("stop")
def stop(
    id: Id,
    grace_s: Annotated[float, typer.Option(help="Seconds between asking and killing.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Stops all sandboxes of a job, also those that are still being created."""
    _all("stop", id, as_json=as_json, grace_s=grace_s)


def _all(verb: str, id: str, *, as_json: bool, **facts: Any) -> None:
    async def work() -> int:
        async with client() as c:
            results = await getattr(c.jobs, verb)(id, **facts)
        return outcomes(results, as_json=as_json)

    run(work, as_json=as_json)
