"""Sandboxes that begin with what another one on this node has changed.

Owns: that the branches of one fork share one copy, held until each of them lies upon it.
Does not own: the copy (driver, :mod:`services.edge.snapshots`), which sandboxes are
branches (the scheduler).

The copy's id is the fork's request id: whichever branch is first has it made, the others
find it, also one that is started again while a sibling lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from services.edge import snapshots
from shared.errors import NotFound

if TYPE_CHECKING:
    from services.edge.actor import Sandbox
    from services.edge.records import Accepted

Find = Callable[[str, str], "Sandbox | None"]
"""A sandbox of this node by project and uid."""


@asynccontextmanager
async def captures(accepted: Accepted, find: Find) -> AsyncIterator[Sequence[str]]:
    """The captures that a start lies upon, kept while the context lasts: none but for a
    branch. Raises ``NotFound`` (``source``) and as :func:`snapshots.capture`."""
    source, branch = accepted.resolved.spec.source, accepted.resolved.branch
    if source is None or branch is None:
        yield ()
        return
    sandbox = find(accepted.item.project, source)
    if sandbox is None:
        raise NotFound(f"its source {source} is not on this node", field="source", cause="runtime")
    driver = snapshots.snapshotting(sandbox)
    captured = await snapshots.capture(sandbox, branch)
    try:
        yield captured.captures
    finally:
        await asyncio.shield(driver.release(captured.id))
