"""Commands of a fake sandbox: what is wrong with a request, signals, how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import Any

from services.edge.drivers.base import ExecIO, ExecSpec, Resize
from services.edge.drivers.fake import tree as trees
from services.edge.drivers.fake.budget import Budget
from shared.errors import DsecError, InvalidRequest, Unsupported

MAX_ENV_BYTES = 128 * 1024
SIGNALS = {"KILL": 9, "TERM": 15, "INT": 2, "HUP": 1, "ABRT": 6, "SEGV": 11, "QUIT": 3}


def check(spec: ExecSpec) -> None:
    if (spec.argv is None) == (spec.shell is None):
        raise InvalidRequest("exactly one of argv and shell", field="argv")
    if spec.pty is not None:
        raise Unsupported("a fake has no terminals", field="pty")
    if spec.user is not None and spec.user not in trees.USERS:
        raise InvalidRequest(f"there is no user {spec.user}", field="user")
    for name, value in spec.env.items():
        if not name or "=" in name:
            raise InvalidRequest(f"variable {name[:64]!r} is bad", field=f"env.{name}")
        if len(name) + len(value) > MAX_ENV_BYTES:
            raise InvalidRequest(f"variable {name[:64]!r} is too long", field="env")


def is_folder(tree: trees.Tree, path: str) -> bool:
    try:
        return tree.find(path)[1].kind == "dir"
    except DsecError:
        return False


async def until_silent(
    waiting: set[asyncio.Future[Any]], spec: ExecSpec, budgets: Collection[Budget]
) -> None:
    """Returns when one of ``waiting`` is done or the command was silent for too long."""
    while not any(future.done() for future in waiting):
        left_s = None
        if spec.idle_timeout_s is not None:
            last = max(budget.written_at for budget in budgets)
            left_s = last + spec.idle_timeout_s - time.monotonic()
            if left_s <= 0:
                return
        await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def signals(io: ExecIO, work: asyncio.Future[Any]) -> None:
    def take(order: str | Resize) -> None:
        if order in SIGNALS:
            work.cancel(order)

    io.control_to(take)


async def ended(work: asyncio.Future[tuple[int, str | None]]) -> tuple[int, str | None]:
    """The result of a command, killed where it goes on."""
    work.cancel("KILL")
    try:
        return await work
    except asyncio.CancelledError as exc:
        current = asyncio.current_task()
        if current and current.cancelling():
            raise
        signal = str(exc.args[0]) if exc.args else "KILL"
        return 128 + SIGNALS.get(signal, 9), signal
