"""Liveness and readiness of a service over HTTP, for supervisors and humans.

``GET /health`` answers 200 when every check passes, else 503 with the failing
ones, and the counters that were added. A check is an async callable that raises. Owns
no policy.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

CHECK_S = 3.0
Check = Callable[[], Awaitable[None]]


class Health:
    """The checks of one service and, with a port, their HTTP face on loopback."""

    def __init__(self, service: str) -> None:
        self.service = service
        self._checks: dict[str, Check] = {}
        self._counters: dict[str, Callable[[], float]] = {}
        self._server: asyncio.Server | None = None

    def add(self, name: str, check: Check) -> None:
        """Adds a check. It gets ``CHECK_S`` seconds."""
        self._checks[name] = check

    def count(self, name: str, value: Callable[[], float]) -> None:
        """Adds a counter, read at each answer."""
        self._counters[name] = value

    async def report(self) -> dict[str, str]:
        """Each check's result: ``ok`` or what is wrong. Never hangs."""
        return dict(zip(self._checks, await asyncio.gather(
            *(self._run(check) for check in self._checks.values())), strict=True))  # fmt: skip

    async def _run(self, check: Check) -> str:
        try:
            async with asyncio.timeout(CHECK_S):
                await check()
        except TimeoutError:
            return f"no answer in {CHECK_S:g} s"
        except Exception as exc:  # a report, not a handler: every failure is shown
            return f"{type(exc).__name__}: {exc}"[:300]
        return "ok"

    async def serve(self, port: int, host: str = "127.0.0.1") -> int:
        """Listens; returns the port (0 chooses a free one)."""
        self._server = await asyncio.start_server(self._answer, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            async with asyncio.timeout(CHECK_S * 2):
                await reader.readline()
                checks = await self.report()
                good = all(result == "ok" for result in checks.values())
                counters = {name: value() for name, value in self._counters.items()}
                body = json.dumps(
                    {"service": self.service, "ready": good, "checks": checks, "counters": counters}
                )
                status = "200 OK" if good else "503 Service Unavailable"
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
                )
                await writer.drain()
        writer.close()

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
