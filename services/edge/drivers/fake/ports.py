"""Ports of a fake sandbox: the echo service, where it always is, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

from services.edge.drivers.base import Handle, PortIO
from shared.errors import NotFound

ECHO = 7


class EchoPorts:
    """Mixed into the driver, which knows whether a sandbox runs."""

    def _running(self, handle: Handle) -> Any:
        raise NotImplementedError

    async def dial(self, handle: Handle, port: int, io: PortIO, *, wait_s: float = 0.0) -> None:
        self._running(handle)
        if port != ECHO:
            await asyncio.sleep(wait_s)  # nothing ever begins to listen
            raise NotFound(
                f"port {port}: nothing in the sandbox listens there", field="port",
                details={"errno": "ECONNREFUSED"},
            )  # fmt: skip
        await io.connected()
        async for chunk in io.input():
            await io.output("stdout", chunk)
        await io.output_ended()
