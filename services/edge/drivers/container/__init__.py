"""The container backend: warm Docker containers that get their root late."""

from __future__ import annotations

from services.edge.drivers.container.driver import ContainerDriver
from services.edge.drivers.container.settings import ContainerSettings, from_options
from services.edge.drivers.registry import DriverConfig

__all__ = ["ContainerDriver", "ContainerSettings", "create"]


def create(config: DriverConfig) -> ContainerDriver:
    """The driver of one edge. Raises ``InvalidRequest`` naming the bad option."""
    return ContainerDriver(from_options(config.node, config.state_dir, config.options))
