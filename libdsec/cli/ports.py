"""``dsec forward``: ports of a sandbox as addresses of this machine."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import AsyncExitStack
from typing import Annotated

import typer

from libdsec import DSecError, InvalidRequest, LocalAddress, PortError, Sandbox
from libdsec.cli.common import Json, client, emit, run


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("forward")(forward)


def forward(
    id: Annotated[str, typer.Argument()],
    ports: Annotated[list[str], typer.Argument(metavar="PORT[:LOCAL]…")],
    wait: Annotated[
        float | None, typer.Option(help="Seconds to wait for something to listen.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Makes ports of a sandbox reachable on this machine, until Ctrl-C. Without LOCAL any
    free port is taken. Prints the addresses; connections that fail are told on stderr."""

    async def work() -> None:
        async with client() as c, AsyncExitStack() as opened:
            sandbox = await c.get(id)
            failures: asyncio.Queue[DSecError | None] = asyncio.Queue()
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, failures.put_nowait, None
            )
            rows: list[dict[str, str | int]] = []
            for text in ports:
                port, local = _pair(text)
                address = await _open(opened, sandbox, port, local, wait, failures)
                rows.append({"port": port, "host": address.host, "local": address.port})
            _tell(rows, as_json=as_json)
            await _report(failures)

    run(work, as_json=as_json)


async def _open(
    opened: AsyncExitStack, sandbox: Sandbox, port: int, local: int, wait: float | None,
    failures: asyncio.Queue[DSecError | None],
) -> LocalAddress:  # fmt: skip
    made = sandbox.port(port, wait=wait, local=local, on_error=failures.put_nowait)
    return await opened.enter_async_context(made)


def _tell(rows: list[dict[str, str | int]], *, as_json: bool) -> None:
    if as_json:
        emit(rows)
    else:
        for row in rows:
            print(f"{row['host']}:{row['local']}\t{row['port']}")
    sys.stdout.flush()


async def _report(failures: asyncio.Queue[DSecError | None]) -> None:
    """Returns when it is to end. Raises what is not about one connection alone."""
    while (error := await failures.get()) is not None:
        if not isinstance(error, PortError):
            raise error
        print(f"dsec: {error}", file=sys.stderr, flush=True)


def _pair(text: str) -> tuple[int, int]:
    port, sign, local = text.partition(":")
    if not port.isdigit() or (sign and not local.isdigit()):
        raise InvalidRequest(f"{text!r} is not PORT[:LOCAL]", field="port")
    return int(port), int(local or 0)
