"""The optional port of drivers that take snapshots: what a sandbox changed, at one moment.

Owns: the protocol and what it returns. Does not own: packing, branches, names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.edge.drivers.base import Handle


@dataclass(frozen=True, slots=True)
class Captured:
    """What a sandbox had changed at one moment. ``folders`` (bottom to top) are like
    overlay's upper ones: whiteouts are devices of number 0, opaque folders carry overlay's
    mark. Nobody changes them. ``captures``: their ids. ``frozen_s``: how long the workload
    stood still for it; ``bytes``: contents copied. ``root``: where the live sandbox's files
    are seen, by who follows no link there."""

    id: str
    folders: Sequence[str]
    captures: Sequence[str]
    frozen_s: float = 0.0
    bytes: int = 0
    entries: int = 0
    root: str = ""


@runtime_checkable
class Snapshotting(Protocol):
    """Optional (feature ``snapshot``): a sandbox's changes as they are at one moment, its
    memory not."""

    async def capture(self, handle: Handle, id: str) -> Captured:
        """Copies what the sandbox changed over its layers, running or paused; it goes on
        as before, also when this raises or is cancelled: then nothing of the copy is left.
        An ``id`` that is there already is returned as it is. Held until :meth:`release`,
        and after it while a sandbox was started from it. Not beside a pause or resume."""
        ...

    async def release(self, id: str) -> None:
        """Idempotent: the caller needs it no more."""
        ...
