"""The fake driver for the conformance suite."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from services.edge.drivers.base import Exited, Handle, StartSpec
from services.edge.drivers.fake import FakeDriver
from services.edge.drivers.registry import DriverConfig


class FakeHarness:
    """See :class:`tests.conformance.harness.Harness`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._exits: list[Exited] = []
        self.driver = self._make()

    def _make(self) -> FakeDriver:
        return FakeDriver(DriverConfig("n1", self._folder))

    async def heard(self, exited: Exited) -> None:
        self._exits.append(exited)

    def spec(self, **changes: object) -> StartSpec:
        return replace(StartSpec(uid="u", project="p", layers=[]), **changes)  # type: ignore[arg-type]

    async def restart(self) -> FakeDriver:
        await self.driver.close()
        self.driver = self._make()
        await self.driver.open(self.heard)
        return self.driver

    def exits(self) -> list[Exited]:
        return self._exits

    async def crash(self, handle: Handle) -> None:
        self.driver._die(handle.uid, "runtime")

    def leftovers(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}
