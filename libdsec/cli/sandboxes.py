"""``dsec ps``, ``info``, ``stop`` (``rm``), ``pause``, ``resume``, ``top``, ``events``."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from libdsec import DSecClient, DSecError, InvalidRequest, Sandbox
from libdsec.cli.common import (
    FAILED,
    Ids,
    Json,
    Labels,
    client,
    emit,
    facts,
    pairs,
    rich_table,
    run,
    size,
    table,
)

LIVE = ("requested", "placed", "starting", "running", "pausing", "paused", "resuming", "stopping")
COLUMNS = ("id", "state", "time_up", "node", "job", "labels")
TOP_COLUMNS = ("id", "cpu", "memory", "peak", "pids", "disk")
MAX_ASKED = 32
"""Sandboxes that are asked for their use at once."""

Job = Annotated[str | None, typer.Option("--job", help="Those of a job.")]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("ps")(processes)
    app.command("info")(info)
    app.command("stop")(stop)
    app.command("rm", help="The same as stop.")(stop)
    app.command("pause")(pause)
    app.command("resume")(resume)
    app.command("top")(top)
    app.command("events")(events)


def processes(
    every: Annotated[bool, typer.Option("--all", "-a", help="Also those that are over.")] = False,
    state: Annotated[list[str] | None, typer.Option(help="Only in these states.")] = None,
    job: Job = None,
    label: Labels = None,
    node: Annotated[str | None, typer.Option()] = None,
    as_json: Json = False,
) -> None:
    """Lists sandboxes."""

    async def work() -> None:
        states = state or (() if every else LIVE)
        async with client() as c:
            found = c.list(job=job, labels=pairs(label, "labels"), state=states, node=node)
            rows = [_row(s) async for s in found]
        table(rows, COLUMNS, as_json=as_json)

    run(work, as_json=as_json)


def _row(sandbox: Sandbox) -> dict[str, Any]:
    return {
        "id": sandbox.id,
        "state": sandbox.state,
        "time_up": sandbox.time_up,
        "node": sandbox.node,
        "job": sandbox.job,
        "labels": sandbox.labels,
    }


def info(id: Annotated[str, typer.Argument()], as_json: Json = False) -> None:
    """Shows what is known of a sandbox."""

    async def work() -> None:
        async with client() as c:
            found = asdict(await (await c.get(id)).info())
        if as_json:
            emit(found)
        else:
            facts(found)

    run(work, as_json=as_json)


def stop(
    ids: Ids = None,
    job: Job = None,
    label: Labels = None,
    grace_s: Annotated[float, typer.Option(help="Seconds between asking and killing.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Stops sandboxes: those named, those of a job, or those that carry labels."""

    async def work() -> int:
        async with client() as c:
            labels = pairs(label, "labels")
            named = ids or None
            results = await c.stop_many(named, job=job, labels=labels, grace_s=grace_s)
        return outcomes(results, as_json=as_json)

    run(work, as_json=as_json)


def outcomes(results: dict[str, DSecError | str], *, as_json: bool) -> int:
    """Shows what became of each; the exit code."""
    rows = [{"uid": uid, "outcome": str(outcome)} for uid, outcome in results.items()]
    table(rows, ("uid", "outcome"), as_json=as_json)
    bad = [o for o in results.values() if isinstance(o, DSecError)]
    return FAILED if bad else 0


def pause(ids: Ids = None, as_json: Json = False) -> None:
    """Pauses sandboxes."""
    _each("pause", ids, as_json=as_json)


def resume(ids: Ids = None, as_json: Json = False) -> None:
    """Resumes sandboxes."""
    _each("resume", ids, as_json=as_json)


def _each(verb: str, ids: list[str] | None, *, as_json: bool) -> None:
    async def work() -> int:
        if not ids:
            raise InvalidRequest("name at least one sandbox", field="id")
        results: dict[str, DSecError | str] = {}
        async with client() as c:
            for id in ids:
                try:
                    sandbox = await c.get(id)
                    await getattr(sandbox, verb)()
                    results[id] = sandbox.state
                except DSecError as exc:
                    results[id] = exc
        return outcomes(results, as_json=as_json)

    run(work, as_json=as_json)


def top(
    interval_s: Annotated[float, typer.Option("--interval", "-n", min=0.5)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One measurement.")] = False,
    job: Job = None,
    label: Labels = None,
    as_json: Json = False,
) -> None:
    """Shows what running sandboxes use; on a terminal until Ctrl-C."""

    async def work() -> None:
        labels = pairs(label, "labels")
        async with client() as c:
            before = await _usage(c, job, labels)
            await asyncio.sleep(min(interval_s, 1.0) if once else interval_s)
            if once or as_json or not sys.stdout.isatty():
                rows = _rates(before, await _usage(c, job, labels))
                table(rows, TOP_COLUMNS, as_json=as_json)
                return
            await _watch(c, before, interval_s, job, labels)

    run(work, as_json=as_json)


Measured = dict[str, tuple[float, dict[str, float]]]


async def _usage(c: DSecClient, job: str | None, labels: dict[str, str]) -> Measured:
    """id → (when, metrics) of all that run and answer."""
    gate = asyncio.Semaphore(MAX_ASKED)

    async def one(sandbox: Sandbox) -> tuple[str, tuple[float, dict[str, float]]] | None:
        async with gate:
            try:
                return sandbox.id, (time.monotonic(), await sandbox.metrics())
            except DSecError:
                return None  # it ended meanwhile

    running = [s async for s in c.list(job=job, labels=labels, state="running")]
    found = await asyncio.gather(*(one(s) for s in running))
    return dict(item for item in found if item is not None)


def _rates(before: Measured, after: Measured) -> list[dict[str, Any]]:
    rows = []
    for id, (at, use) in after.items():
        then, old = before.get(id, (at, use))
        spent = use.get("cpu_s", 0.0) - old.get("cpu_s", 0.0)
        share = 100 * spent / (at - then) if at > then else 0.0
        rows.append(
            {
                "id": id,
                "cpu": f"{share:.1f}%",
                "memory": size(use.get("memory_bytes", 0)),
                "peak": size(use.get("memory_peak_bytes", 0)),
                "pids": int(use.get("pids", 0)),
                "disk": size(use.get("disk_bytes", 0)),
            }
        )
    return rows


async def _watch(
    c: DSecClient, before: Measured, interval_s: float, job: str | None, labels: dict[str, str]
) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=True) as live:
        while True:
            after = await _usage(c, job, labels)
            rows = [[str(r[n]) for n in TOP_COLUMNS] for r in _rates(before, after)]
            live.update(rich_table(rows, TOP_COLUMNS), refresh=True)
            before = after
            await asyncio.sleep(interval_s)


def events(job: Job = None, label: Labels = None, as_json: Json = False) -> None:
    """Prints state changes of sandboxes as they happen, until Ctrl-C."""

    async def work() -> None:
        async with client() as c:
            async for event in c.events(job=job, labels=pairs(label, "labels")):
                if as_json:
                    print(json.dumps(asdict(event)), flush=True)
                    continue
                cause = f" ({event.cause})" if event.cause else ""
                print(f"{event.at:.3f}\t{event.state}{cause}\t{event.id or event.uid}", flush=True)

    run(work, as_json=as_json)
