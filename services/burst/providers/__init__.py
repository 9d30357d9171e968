"""Where cloud nodes come from: one port, one module a provider."""

from __future__ import annotations

from services.burst.providers.base import Provider
from services.burst.providers.none import NoProvider
from shared.errors import InvalidRequest

__all__ = ["NoProvider", "Provider", "make"]


def make(name: str) -> Provider:
    """The provider of that name. Raises ``InvalidRequest`` for an unknown one."""
    if name == "none":
        return NoProvider()
    raise InvalidRequest(f"there is no burst provider {name!r}", field="burst_provider")
