"""The edge's connection to the bus, which may end while the edge lives on.

Owns: which :class:`Bus` is the present one. Does not own: making it (app).
"""

from __future__ import annotations

from shared.bus import HEADER_BYTES, Bus
from shared.errors import Unavailable


class Link:
    """Holds the present bus."""

    def __init__(self) -> None:
        self._bus: Bus | None = None

    @property
    def bus(self) -> Bus:
        """The present bus. Raises ``Unavailable`` while there is none."""
        if self._bus is None:
            raise Unavailable("bus: not connected")
        return self._bus

    @property
    def is_up(self) -> bool:
        """Whether there is a server now."""
        return self._bus is not None and self._bus.client.is_connected

    def payload_limit(self) -> int:
        """Bytes of the largest message beside its headers."""
        return (1 << 20) if self._bus is None else int(self._bus.client.max_payload) - HEADER_BYTES

    def set(self, bus: Bus | None) -> None:
        """There is a new one, or none."""
        self._bus = bus

    async def check(self) -> None:
        """A health check."""
        await self.bus.check()
