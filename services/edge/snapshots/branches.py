"""Sandboxes that begin with what another one on this node has changed.

Owns: that the branches of one fork share one copy, held until each of them lies upon it,
and the policy its source was under. Does not own: the copy (driver,
:mod:`services.edge.snapshots.snapshots`), which sandboxes are branches (the scheduler).

The copy's id is the fork's request id: the first branch has it made, the others wait for
it beside that one. A branch that is started again while a sibling lives finds it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from schemas.sandbox import SandboxSpec
from services.edge.drivers.snapshotting import Captured, Snapshotting
from services.edge.snapshots import snapshots
from shared.errors import DsecError, NotFound

if TYPE_CHECKING:
    from services.edge.journal.records import Accepted
    from services.edge.sandbox.actor import Sandbox

log = logging.getLogger(__name__)

Find = Callable[[str, str], "Sandbox | None"]
"""A sandbox of this node by project and uid."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a start lies upon: captures, bottom to top, and of a branch the spec of its
    source under the policy that was in force."""

    captures: Sequence[str] = ()
    source: SandboxSpec | None = None


@dataclass(slots=True)
class _Copy:
    """The one copy of a fork: made or being made, for so many of its branches."""

    made: asyncio.Task[tuple[Captured, SandboxSpec]]
    driver: Snapshotting
    wanted: int = 0


class Captures:
    """The copies that starts under way lie upon."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self._copies: dict[tuple[str, str], _Copy] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def below(self, accepted: Accepted) -> AsyncIterator[Base]:
        """What a start lies upon, kept while the context lasts: nothing but for a branch.
        Raises ``NotFound`` (``source``) and as :func:`snapshots.capture`."""
        source, branch = accepted.resolved.spec.source, accepted.resolved.branch
        if source is None or branch is None:
            yield Base()
            return
        key = (accepted.item.project, branch)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = self._copy(accepted.item.project, source, branch)
        copy.wanted += 1
        try:
            captured, spec = await asyncio.shield(copy.made)
            yield Base(captured.captures, spec)
        finally:
            copy.wanted -= 1
            if not copy.wanted:
                del self._copies[key]
                # the last branch that starts waits for none of this
                task = asyncio.create_task(_let_go(copy), name=f"capture {branch}")
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    def _copy(self, project: str, source: str, branch: str) -> _Copy:
        sandbox = self._find(project, source)
        if sandbox is None:
            text = f"its source {source} is not on this node"
            raise NotFound(text, field="source", cause="runtime")
        driver = snapshots.snapshotting(sandbox)
        work = _captured(sandbox, branch)
        return _Copy(asyncio.create_task(work, name=f"capture {branch}"), driver)

    async def close(self) -> None:
        """Returns when what is not needed any more is given back."""
        if self._leaving:
            await asyncio.wait(self._leaving)


async def _captured(sandbox: Sandbox, branch: str) -> tuple[Captured, SandboxSpec]:
    captured = await snapshots.capture(sandbox, branch)
    return captured, sandbox.accepted.resolved.spec


async def _let_go(copy: _Copy) -> None:
    copy.made.cancel()  # nobody waits for it any more, if it is not made
    with suppress(asyncio.CancelledError, DsecError):
        captured, _ = await copy.made
        try:
            await copy.driver.release(captured.id)
        except Exception:  # the driver's next sweep collects it
            log.exception("capture %s is not given back", captured.id)
