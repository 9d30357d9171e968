"""The heartbeats of late: what burst knows of the nodes. No I/O; time is passed in."""

from __future__ import annotations

from schemas.node import Heartbeat

MAX_NODES = 20_000
"""Nodes remembered at most; the map must not grow with what strangers send."""


class Fleet:
    """The last heartbeat of each node. A node silent for ``silent_s`` is no part of it."""

    def __init__(self, silent_s: float) -> None:
        self._silent_s = silent_s
        self._beats: dict[str, tuple[float, Heartbeat]] = {}

    def heard(self, beat: Heartbeat, now: float) -> None:
        """Takes a heartbeat that came at monotonic ``now``."""
        if beat.node in self._beats or len(self._beats) < MAX_NODES:
            self._beats[beat.node] = (now, beat)

    def present(self, now: float) -> list[Heartbeat]:
        """Heartbeats of the nodes heard of late; forgets the others."""
        self._beats = {
            node: (at, beat)
            for node, (at, beat) in self._beats.items()
            if now - at <= self._silent_s
        }
        return [beat for _, beat in self._beats.values()]
