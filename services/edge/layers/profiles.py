"""What a layer's first reader needed, to be fetched ahead for its next one.

Owns: the list of chunks in the order of their first use, one file a layer. Does not own:
fetching. It is a hint: a wrong or missing one costs time, never correctness.
"""

from __future__ import annotations

import array
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NAME = "profile"


class Profiles:
    """Recorded in the first ``seconds`` after a layer without a profile is first read."""

    def __init__(
        self, *, seconds: float, chunks_max: int,
        finished: Callable[[Path, list[int]], None] = lambda folder, chunks: None,
    ) -> None:  # fmt: skip
        self._seconds, self._chunks_max = seconds, chunks_max
        self._finished = finished
        self._recording: dict[Path, tuple[float, dict[int, None]]] = {}

    def used(self, folder: Path, chunks: range) -> None:
        """These chunks of the layer were read."""
        recording = self._recording.get(folder)
        if recording is None:
            if (folder / NAME).exists():
                self._recording[folder] = (0.0, {})  # remembered, so that it is asked once
                return
            recording = self._recording[folder] = (time.monotonic() + self._seconds, {})
        until, seen = recording
        if not until:
            return
        if time.monotonic() > until or len(seen) >= self._chunks_max:
            self.finish(folder)
        else:
            seen.update(dict.fromkeys(chunks))

    def finish(self, folder: Path) -> None:
        """Ends the recording: its time is over, or nobody has the layer open any more."""
        until, seen = self._recording.pop(folder, (0.0, {}))
        if until and seen:
            self._finished(folder, list(seen))
            with suppress(OSError):  # the layer may be evicted, the disk full
                (folder / NAME).write_bytes(array.array("I", seen).tobytes())

    def of(self, folder: Path) -> list[int]:
        """The chunks to fetch ahead, in their order."""
        with suppress(OSError, ValueError):
            return array.array("I", (folder / NAME).read_bytes()).tolist()[: self._chunks_max]
        return []
