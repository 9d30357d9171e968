"""``dsec doctor`` and ``whoami``: is everything as it should be, and if not, what."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

from libdsec import DSecClient, DSecContainerRunArgs, DSecError
from libdsec.cli.common import FAILED, Json, client, emit, run, table

COLUMNS = ("check", "ok", "found")
NO_IMAGE = "none: `dsec image import NAME PATH` brings one"
Check = dict[str, Any]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command("doctor")(doctor)
    app.command("whoami")(whoami)


def whoami(as_json: Json = False) -> None:
    """Shows who the key is and what it may do."""

    async def work() -> None:
        async with client() as c:
            me = await c.whoami()
        facts = {"principal": me.principal, "project": c.project, "grants": me.grants or []}
        if as_json:
            emit(facts)
        else:
            table([{"name": k, "value": v} for k, v in facts.items()], ("name", "value"),
                  as_json=False)  # fmt: skip

    run(work, as_json=as_json)


def doctor(
    image: Annotated[
        str | None, typer.Option(help="Also run `true` in a sandbox of this image.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Checks connection, grants, nodes and images. Exits with 125 if one fails."""

    async def work() -> int:
        rows = [row async for row in _checks(image)]
        table(rows, COLUMNS, as_json=as_json)
        return 0 if all(row["ok"] for row in rows) else FAILED

    run(work, as_json=as_json)


async def _checks(image: str | None) -> AsyncIterator[Check]:
    begun = time.monotonic()
    try:
        c = await client(keep=False).open()
    except DSecError as exc:
        yield _bad("connection", exc)
        return
    try:
        yield _good("connection", f"{c._config.url} in {_ms(begun)}, principal {c.principal}")
        for name, check in (("grants", _grants), ("nodes", _nodes), ("images", _images)):
            try:
                yield await check(c)
            except DSecError as exc:
                yield _bad(name, exc)
        if image is not None:
            yield await _sandbox(c, image)
    finally:
        await c.close()


async def _grants(c: DSecClient) -> Check:
    found = (await c.whoami()).grants or []
    return {"check": "grants", "ok": bool(found), "found": ", ".join(sorted(found)) or "none"}


async def _nodes(c: DSecClient) -> Check:
    nodes = await c.nodes.list()
    ready = [n for n in nodes if n.state == "ready"]
    backends = sorted({b for n in ready for b, s in n.backends.items() if s.supported})
    text = f"{len(ready)} of {len(nodes)} ready; backends: {', '.join(backends) or 'none'}"
    return {"check": "nodes", "ok": bool(ready and backends), "found": text}


async def _images(c: DSecClient) -> Check:
    names = [image.name for image in await c.images.list()]
    return {"check": "images", "ok": bool(names), "found": ", ".join(names) or NO_IMAGE}


async def _sandbox(c: DSecClient, image: str) -> Check:
    begun = time.monotonic()
    try:
        sandbox = await c.create(DSecContainerRunArgs(container_image=image), timeout=60)
        made = _ms(begun)
        begun = time.monotonic()
        result = await sandbox.exec("true", timeout=30)
        text = f"created in {made}, `true` in {_ms(begun)}: exit code {result.exit_code}"
        return {"check": "sandbox", "ok": result.ok, "found": text}
    except DSecError as exc:
        return _bad("sandbox", exc)


def _ms(begun: float) -> str:
    return f"{(time.monotonic() - begun) * 1000:.1f} ms"


def _good(name: str, found: str) -> Check:
    return {"check": name, "ok": True, "found": found}


def _bad(name: str, error: DSecError) -> Check:
    return {"check": name, "ok": False, "found": f"{error.code}: {error}"}
