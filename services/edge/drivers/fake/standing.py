"""Fake sandboxes that stand still, and whose commands are killed.

Owns: the driver port's optional ``Pausable`` and ``Clearing``. Does not own: the sandboxes
(driver), the faults that are ordered (:mod:`.faults`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from services.edge.drivers.base import Handle
from services.edge.drivers.fake import faults
from services.edge.drivers.fake.state import Live, State


class Standing(ABC):
    """See the module."""

    @abstractmethod
    def _alive(self, handle: Handle) -> Live: ...

    @abstractmethod
    def _save(self, state: State) -> None: ...

    async def pause(self, handle: Handle) -> None:
        await self._stand(self._alive(handle), "pause", paused=True)

    async def resume(self, handle: Handle) -> None:
        await self._stand(self._alive(handle), "resume", paused=False)

    async def _stand(self, live: Live, verb: str, *, paused: bool) -> None:
        if live.state.paused == paused:
            return
        await self._fail(live, verb)
        live.stand(paused)
        self._save(live.state)

    async def reclaim(self, handle: Handle) -> int:
        live = self._alive(handle)
        await self._fail(live, "reclaim")
        return 0

    async def clear(self, handle: Handle) -> None:
        live = self._alive(handle)
        await self._fail(live, "clear")
        for work in list(live.works):
            work.cancel("KILL")
        for task in live.background:
            task.cancel()

    async def _fail(self, live: Live, verb: str) -> None:
        state = live.state
        state.calls[verb] = state.calls.get(verb, 0) + 1
        self._save(state)  # before: a new process counts on
        await faults.pause_faults(state.options, state.calls[verb], verb)
