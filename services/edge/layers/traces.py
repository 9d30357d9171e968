"""What of layers was read, for the edge to tell. Owns: a bounded list of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from services.edge.layers.control import Trace

KEPT = 1000
TOLD_MAX = 32
"""In one answer, which is at most a MiB."""


class Traces:
    """The latest traces. Numbers begin with the time in milliseconds, so that those of a
    later process come after."""

    def __init__(self, unit_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._number = int(time.time() * 1000)
        self._traces: deque[Trace] = deque(maxlen=KEPT)

    def add(self, digest: str, units: Sequence[int]) -> None:
        """The first reader of a layer has ended, or its time is over."""
        self._number += 1
        self._traces.append(Trace(self._number, digest, self._unit_bytes, sorted(units)))

    def after(self, number: int) -> list[Trace]:
        """Those that came after the one of that number, the oldest first."""
        return [trace for trace in self._traces if trace.number > number][:TOLD_MAX]
