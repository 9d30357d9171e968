"""A service as a supervised child: started, watched by its health port, restarted.

Owns: one child's life, its restarts with back-off, its readiness. Does not own: what
it runs and with which settings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGTERM

from devstack.process import Child, StartError

log = logging.getLogger(__name__)

BACKOFF_BASE_S = 0.2
BACKOFF_MAX_S = 10.0
STEADY_S = 20.0
"""A child that lived so long starts its back-off anew."""
MAX_EARLY_EXITS = 3
"""A child that ends so often before it was ever ready is not going to be."""
POLL_S = 0.05
ANSWER_S = 4.0
"""Longest wait for one answer of a health port."""


class Supervised:
    """One service process. ``health_port`` 0 means that it has none: it is ready at once."""

    def __init__(
        self, name: str, argv: Sequence[str], env: Mapping[str, str], *, log_file: Path,
        health_port: int, cwd: Path,
    ) -> None:  # fmt: skip
        self.name = name
        self.health_port = health_port
        self.restarts = 0
        self._argv, self._env, self._cwd = list(argv), dict(env), cwd
        self._child = Child(name, log_file, death_signal=SIGTERM, stop_signal=SIGTERM)
        self._watch: asyncio.Task[None] | None = None
        self._was_ready = False

    @property
    def pid(self) -> int | None:
        """Process id, ``None`` while it is down."""
        return self._child.pid

    @property
    def log_file(self) -> Path:
        """Where it writes."""
        return self._child.log

    async def launch(self) -> None:
        """Starts it and watches over it; does not wait until it is ready."""
        await self._spawn()
        self._watch = asyncio.create_task(self._keep_alive(), name=f"watch {self.name}")

    async def _spawn(self) -> None:
        async def at_once() -> bool:
            return True

        await self._child.start(self._argv, ready=at_once, cwd=self._cwd, env=self._env)

    async def _keep_alive(self) -> None:
        delay = BACKOFF_BASE_S
        while True:
            began = time.monotonic()
            code = await self._child.wait()
            delay = BACKOFF_BASE_S if time.monotonic() - began > STEADY_S else delay
            log.warning("%s ended with %s, started again in %.1f s", self.name, code, delay)
            await asyncio.sleep(delay)
            delay = min(BACKOFF_MAX_S, delay * 2)
            self.restarts += 1
            await self._spawn()

    async def wait_ready(self, within_s: float) -> None:
        """Returns when its health port says ready. Raises :class:`StartError` with the
        failing checks and its last log lines after ``within_s`` or repeated exits."""
        end, report = time.monotonic() + within_s, "no answer"
        while self.health_port:
            good, report = await health(self.health_port)
            if good:
                break
            early = not self._was_ready and self.restarts >= MAX_EARLY_EXITS
            if early or time.monotonic() > end:
                why = "ends at its start" if early else f"not ready after {within_s:g} s"
                raise StartError(f"{self.name}: {why}: {report}\n{self._child.log_tail()}")
            await asyncio.sleep(POLL_S)
        self._was_ready = True

    async def kill(self) -> None:
        """SIGKILL; it stays down until :meth:`launch`."""
        await self._unwatch()
        await self._child.kill()

    async def stop(self) -> None:
        """Asks it to end, and returns when it has. Idempotent."""
        await self._unwatch()
        await self._child.stop()

    async def _unwatch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None


async def health(port: int) -> tuple[bool, str]:
    """Whether the service on ``port`` is ready, and its report in a few words."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError) as exc:
        return False, type(exc).__name__
    head, _, body = answer.partition(b"\r\n\r\n")
    if b" 200 " in head.partition(b"\r\n")[0]:
        return True, "ready"
    with contextlib.suppress(ValueError):
        checks = json.loads(body)["checks"]
        return False, "; ".join(f"{k}: {v}" for k, v in checks.items() if v != "ok")
    return False, "unreadable answer"
