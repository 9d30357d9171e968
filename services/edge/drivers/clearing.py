"""The driver port's optional protocol for ending an agent's work; rules: :mod:`.base`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from services.edge.drivers.base import Handle


@runtime_checkable
class Clearing(Protocol):
    """Optional: everything that runs in a sandbox is killed, and the sandbox lives on."""

    async def clear(self, handle: Handle) -> None:
        """Kills every process of the workload: commands with their trees, sessions, what
        they left behind. Returns when none of them runs any instruction any more; commands
        come to their result (``KILL``). Files are as they were, and new commands begin at
        once. A paused sandbox stays paused, and takes it at the latest when it goes on,
        before anything else. Raises ``Unavailable`` where processes do not die."""
        ...
