"""What burst is configured with."""

from __future__ import annotations

from shared.settings import Common


class Settings(Common, kw_only=True):
    """``burst_threshold``: on-prem utilisation above which bursting begins;
    ``burst_floor``: the one below which it ends. ``burst_node_*``: what one cloud node
    brings. ``burst_max_nodes`` bounds what may be leased. Times in seconds."""

    pg_dsn: str
    burst_provider: str = "none"
    burst_threshold: float = 0.8
    burst_floor: float = 0.7
    burst_max_share: float = 1.0
    burst_max_nodes: int = 200
    burst_node_cores: float = 64.0
    burst_node_memory_mb: int = 262_144
    burst_node_sandboxes: int = 1_000
    burst_every_s: float = 1.0
    burst_publish_s: float = 30.0
    burst_silent_s: float = 5.0
    burst_keep_s: float = 30 * 86_400.0
    """How long told plans and leases that are over are kept."""
