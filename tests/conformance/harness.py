"""What a driver brings to the conformance suite.

Owns: the harness port and the list of drivers. Does not own: the rules, which are the
prose of :mod:`services.edge.drivers.base` and the tests beside this file. To add a
driver: write a factory and add it to :data:`DRIVERS`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from services.edge.drivers.base import (
    Driver,
    ExecOutcome,
    ExecSpec,
    Exited,
    Handle,
    Resize,
    StartSpec,
    Stream,
)  # fmt: skip
from services.edge.drivers.files import FileInfo, Files


class Harness(Protocol):
    """One driver under test."""

    driver: Driver

    def spec(self, **changes: object) -> StartSpec:
        """A spec that starts: a root with a POSIX shell, users root and agent."""
        ...

    async def restart(self) -> Driver:
        """A new driver over the same node and state, as after the death of the edge."""
        ...

    def exits(self) -> list[Exited]:
        """Deaths reported so far, in order."""
        ...

    async def crash(self, handle: Handle) -> None:
        """Makes the sandbox die on its own."""
        ...

    def leftovers(self) -> set[str]:
        """Names of everything on the node that belongs to sandboxes."""
        ...


HANG_S = 60.0
"""What has not come by then does not come: no test waits so long for what is not stuck."""
SLEEPERS = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -cxE '[s]leep'"
"""A command that counts the `sleep`s that run. What is dead has no command line, but has a
name until it is reaped, which may be a moment later."""
HarnessFactory = Callable[[Path], AbstractAsyncContextManager[Harness]]


@asynccontextmanager
async def _container(folder: Path) -> AsyncIterator[Harness]:
    from tests.integration.container.harness import container_harness

    async with container_harness(folder) as harness:
        yield harness


@asynccontextmanager
async def _fake(folder: Path) -> AsyncIterator[Harness]:
    from tests.conformance.fake import FakeHarness

    harness = FakeHarness(folder)
    await harness.driver.open(harness.heard)
    yield harness
    await harness.driver.close()


DRIVERS: dict[str, HarnessFactory] = {"container": _container, "fake": _fake}

LACKS: dict[str, dict[str, str]] = {
    "fake": {
        "test_a_signal_reaches_the_command": "its shell has no traps",
        "test_defaults_of_the_sandbox_apply": "its shell substitutes no commands",
        "test_output_over_the_budget_keeps_head_and_tail": "its shell has no pipes",
        "test_usage_counts_the_work": "it has no processes whose CPU time could rise",
        "test_commands_run_side_by_side": "its shell has no loops",
        "test_a_port_is_reached_once_something_listens": "its shell serves nothing",
        "test_rights_are_the_users": "its files have no owners",
        "test_what_a_command_left_behind_is_gone": "what its commands leave behind does nothing",
    }
}
"""Tests that a driver can't be put to, and why: of its means, never of its promises."""


@dataclass
class Recorder:
    """An ``ExecIO`` that keeps what it gets."""

    stdin: list[bytes] = field(default_factory=list)
    stdout: bytes = b""
    stderr: bytes = b""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    _take: Callable[[str | Resize], None] | None = None
    _waiting: list[str | Resize] = field(default_factory=list)

    async def output(self, stream: Stream, data: bytes) -> None:
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if stream == "stdout":
            self.stdout += data
        else:
            self.stderr += data
        self.started.set()

    async def input(self) -> AsyncIterator[bytes]:
        while self.stdin:
            yield self.stdin.pop(0)

    async def resumes(self, *, taken: int, terminal: bool, base: tuple[int, int] = (0, 0)) -> None:
        self.base = base

    def control_to(self, take: Callable[[str | Resize], None]) -> None:
        self._take = take
        for order in self._waiting:
            take(order)

    def order(self, order: str | Resize) -> None:
        """A signal, or a new size of the terminal."""
        self._take(order) if self._take else self._waiting.append(order)


@dataclass(frozen=True)
class Ran:
    """A finished command."""

    outcome: ExecOutcome
    stdout: bytes
    stderr: bytes

    @property
    def code(self) -> int | None:
        return self.outcome.exit_code


async def run(
    driver: Driver, handle: Handle, command: str | list[str], *, io: Recorder | None = None,
    **changes: object,
) -> Ran:  # fmt: skip
    """Runs shell text or an argv to its end."""
    io = io or Recorder()
    what = {"shell": command} if isinstance(command, str) else {"argv": command}
    spec = ExecSpec(op_id=secrets.token_hex(8), **what, **changes)  # type: ignore[arg-type]
    outcome = await driver.exec(handle, spec, io)
    return Ran(outcome, io.stdout, io.stderr)


def new_uid() -> str:
    return "t" + secrets.token_hex(6)


async def until(condition: Callable[[], bool], *, within_s: float = HANG_S) -> None:
    """Waits until the condition holds; fails with ``TimeoutError`` when it never does."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def listed(
    files: Files, handle: Handle, path: str, *, recursive: bool = False
) -> list[FileInfo]:
    """What a directory holds, sorted by path."""
    batches = files.list(handle, path, user=None, recursive=recursive)
    found = [info async for batch in batches for info in batch]
    return sorted(found, key=lambda info: info.path)
