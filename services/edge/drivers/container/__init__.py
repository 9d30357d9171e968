"""The container backend: warm Docker containers that get their root late."""

from services.edge.drivers.container.driver import ContainerDriver
from services.edge.drivers.container.settings import ContainerSettings

__all__ = ["ContainerDriver", "ContainerSettings"]
