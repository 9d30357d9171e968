"""How sandboxes ended and how often they were placed again, counted since the start.

Owns: the counts. Does not own: showing them (:mod:`shared.health`). What a trainer masks is
``ended_infra``; the causes of the rest are its own.
"""

from __future__ import annotations

from collections import Counter

from services.scheduler.model import Changes

COUNTED = ("ended", "ended_infra", "lost", "placed_again")


class Tally:
    """Of one scheduler: several of them count what each has done."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def add(self, changes: Changes) -> None:
        """A transaction's changes, which are committed."""
        for row in changes.changed():
            was = changes.was.get(row.uid)
            if row.terminal and not (was is not None and was.terminal):
                self._counts["ended"] += 1
                self._counts["ended_infra"] += row.is_infra
                self._counts["lost"] += row.state == "lost"
            if was is not None and len(row.tried) > len(was.tried):
                self._counts["placed_again"] += 1
