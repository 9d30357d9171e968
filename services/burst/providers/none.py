"""No cloud: burst computes and publishes what it would do, and leases nothing."""

from __future__ import annotations

from shared.errors import Unsupported


class NoProvider:
    """Cannot lease, and says so."""

    name = "none"
    supported = False
    reason = "no cloud provider is configured"

    async def lease(self, lease_id: str) -> str:
        """Raises ``Unsupported``."""
        raise Unsupported(self.reason, field="burst_provider")

    async def release(self, node: str) -> None:
        """Raises ``Unsupported``."""
        raise Unsupported(self.reason, field="burst_provider")
