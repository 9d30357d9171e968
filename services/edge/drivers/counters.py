"""What sandboxes ran into: an optional part of the driver port.

Owns: its form. Does not own: reading it (drivers), telling it
(:mod:`services.edge.reports.excess`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from services.edge.drivers.base import Handle


@dataclass(frozen=True, slots=True)
class Counters:
    """Of a sandbox since it was made: how often it was refused a new process, how many of
    its processes were killed for memory; the bytes on its limited disk, and whether
    hardly any more can be written there."""

    pids_refused: int = 0
    oom_kills: int = 0
    disk_bytes: int = 0
    disk_full: bool = False


@runtime_checkable
class Counting(Protocol):
    """Optional: counters that are cheap enough to be read every second."""

    async def counters(self, handles: Sequence[Handle]) -> list[Counters]:
        """Of each, in order; of one that is gone all are 0."""
        ...
