"""What a fake sandbox is: on disk, and in memory while its driver lives.

Owns: the two forms. Does not own: what is done with them (driver).
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from services.edge.drivers.base import Exited
from services.edge.drivers.fake import tree as trees
from services.edge.sandbox.runclock import RunClock


class State(msgspec.Struct):
    """A sandbox as it is kept on disk."""

    uid: str
    boot: str
    options: dict[str, Any]
    env: dict[str, str]
    workdir: str
    started_at: float
    tree: trees.Tree
    paused: bool = False
    stops: int = 0
    calls: dict[str, int] = {}


class Live:
    """A sandbox in memory."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.commands: set[asyncio.Future[Any]] = set()
        self.works: set[asyncio.Future[Any]] = set()
        self.background: set[asyncio.Future[int]] = set()
        self.timer: asyncio.TimerHandle | None = None
        self.death: Exited | None = None
        self.clock = RunClock(time.monotonic)
        self.goes = asyncio.Event()
        self.stand(state.paused)

    def stand(self, paused: bool) -> None:
        """Has its commands stand still, or go on."""
        self.state.paused = paused
        if paused:
            self.clock.stop()
            self.goes.clear()
        else:
            self.clock.go()
            self.goes.set()
