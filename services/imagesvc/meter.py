"""How far an import is, and whether it is to go on.

Owns: counting, the steps in which it is told. Does not own: whom it is told to.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import DeadlineExceeded

Stage = Literal["reading", "building", "fetching", "writing", "storing"]
REPORT_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """``total_bytes`` is 0 until the source was read."""

    stage: Stage
    done_bytes: int
    total_bytes: int


class Cancelled(Exception):
    """The caller no longer wants the result."""


@dataclass(slots=True)
class Meter:
    """Counts bytes and passes them on in steps of :data:`REPORT_BYTES`."""

    report: Callable[[ImportProgress], None] | None
    cancelled: Callable[[], bool]
    stage: Stage = "reading"
    done_bytes: int = 0
    total_bytes: int = 0
    seconds_max: float = math.inf
    """How long the import may take, from now."""
    _reported: int = 0
    _began_s: float = field(default_factory=time.monotonic)

    def start(self, stage: Stage, total_bytes: int) -> None:
        if stage == "writing":  # what was fetched for it is not its own work
            self.done_bytes = self._reported = 0
        self.stage, self.total_bytes = stage, total_bytes
        self._send()

    def advance(self, done: int) -> None:
        if self.cancelled():
            raise Cancelled
        if time.monotonic() - self._began_s > self.seconds_max:
            raise DeadlineExceeded(f"an import of over {self.seconds_max:g} s")
        self.done_bytes += done
        if self.done_bytes - self._reported >= REPORT_BYTES:
            self._send()

    def _send(self) -> None:
        self._reported = self.done_bytes
        if self.report is not None:
            self.report(ImportProgress(self.stage, self.done_bytes, self.total_bytes))
