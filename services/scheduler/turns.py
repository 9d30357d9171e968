"""Creates that wait for room on a node: which are next, and how many may wait. Pure.

Owns: the order between projects, the queue's bounds. Does not own: when a create
waits and for how long (``decide``), the passes (``reconcile``). The queue itself is
the table: requested sandboxes whose cause is ``capacity``. It survives its scheduler,
and two share it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from schemas.base import WireError
from services.scheduler.model import Sandbox


@dataclass(frozen=True, slots=True)
class Queue:
    """How many wait, by project, and the least of what one of them asks for."""

    counts: Mapping[str, int]
    cores: float = 0.0
    memory_mb: int = 0

    @property
    def total(self) -> int:
        """All that wait."""
        return sum(self.counts.values())

    def plus(self, rows: Sequence[Sandbox]) -> Queue:
        """The queue with ``rows`` in it, too."""
        if not rows:
            return self
        counts = Counter(self.counts) + Counter(r.project for r in rows)
        cores, memory_mb = min(r.cores for r in rows), min(r.memory_mb for r in rows)
        if self.total:
            cores, memory_mb = min(cores, self.cores), min(memory_mb, self.memory_mb)
        return Queue(counts, cores, memory_mb)


class Turns:
    """Whose turn it is: projects that wait are served alike, one sandbox a turn,
    however many they wait for and whoever came first. Within a project as they came."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    def order(self, rows: Iterable[Sandbox]) -> list[Sandbox]:
        """``rows`` as they are to be placed."""
        by_project: dict[str, list[Sandbox]] = defaultdict(list)
        for row in sorted(rows, key=_age):
            by_project[row.project].append(row)
        start = self._start(by_project)
        turns = [
            (start[project] + n, row)
            for project, mine in by_project.items()
            for n, row in enumerate(mine)
        ]
        return [row for _, row in sorted(turns, key=lambda t: (t[0], _age(t[1])))]

    def _start(self, projects: Iterable[str]) -> dict[str, int]:
        # one that comes anew has no claim to what others were given before
        least = min(self._served.values(), default=0)
        return {p: self._served.get(p, least) for p in projects}

    def served(self, placed: Iterable[str], waiting: Iterable[str]) -> None:
        """Counts placements, one project each; forgets projects that do not wait."""
        counts, waits = Counter(placed), set(waiting)
        start = self._start(waits | counts.keys())
        self._served = {p: start[p] + counts[p] for p in waits}


def _age(row: Sandbox) -> tuple[float, str, int]:
    return row.created_at, row.request_id or "", row.index


def full(error: WireError, queue: Queue) -> WireError:
    """The error of a create that found no room, and none to wait in either."""
    message = f"{error.message}; {queue.total} creates wait for room already (wait_rows)"
    return replace(error, message=message)


def too_many(
    wanting: Sequence[Sandbox], queue: Queue, *, limit: int, project_limit: int
) -> list[Sandbox]:
    """Those of ``wanting`` that find no place in the queue, where ``limit`` may wait
    in all and ``project_limit`` of one project."""
    counts, total = Counter(queue.counts), queue.total
    out = []
    for row in wanting:
        if total >= limit or counts[row.project] >= project_limit:
            out.append(row)
            continue
        counts[row.project] += 1
        total += 1
    return out
