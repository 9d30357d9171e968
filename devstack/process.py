"""One child process of the stack: started, waited for, stopped, killed.

Owns: a server's process and its log. Does not own: configuration and what "ready"
means, which the three components say.

The child dies with its parent: ``setpriv --pdeathsig`` arms the kernel's parent-death
signal before it executes the server. A ``preexec_fn`` would do the same but forces
``fork`` instead of ``vfork`` and runs Python between fork and exec. The kernel sends
the signal when the *thread* that started the child ends, so :class:`devstack.Infra`
is started from a thread that lives as long as it does.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from signal import Signals

READY_DEADLINE_S = 60.0
READY_POLL_S = 0.02
STOP_DEADLINE_S = 15.0
LOG_TAIL_LINES = 20
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORTS_FROM = 10_000
PORT_TRIES = 1_000
_given: set[int] = set()


class StartError(RuntimeError):
    """A component did not become ready; the message ends with its log's last lines."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now and that no other call here was given.

    It is none that the kernel chooses for outgoing connections: one of those could sit
    there before its user binds it, and again whenever a server is restarted, be it a
    client's that dials the very server. Another process may still take it; a component
    that loses that race fails to start.
    """
    below = int(EPHEMERAL.read_text().split()[0])
    for _ in range(PORT_TRIES):
        port = secrets.randbelow(below - PORTS_FROM) + PORTS_FROM if below > PORTS_FROM else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            port = int(probe.getsockname()[1])
            if port not in _given:
                _given.add(port)
                return port
    raise StartError(f"no free port in {PORT_TRIES} tries")


class Child:
    """A server process. ``argv`` is executed as it is; output is appended to ``log``.

    ``death_signal`` is what the kernel sends the child when this process dies, also by
    SIGKILL. ``setpriv`` are further options of setpriv(1), such as another user.
    """

    def __init__(
        self,
        name: str,
        log: Path,
        *,
        death_signal: Signals,
        stop_signal: Signals,
        setpriv: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.log = log
        self._death_signal = death_signal
        self._stop_signal = stop_signal
        self._setpriv = tuple(setpriv)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The running child's process id, ``None`` while it does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(
        self,
        argv: Sequence[str],
        *,
        ready: Callable[[], Awaitable[bool]],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Execute ``argv`` and return when ``ready()`` is true. Raises
        :class:`StartError` when it exits first or after ``READY_DEADLINE_S``; nothing
        runs then. ``env`` is the whole environment (default: this process's)."""
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        signal_name = self._death_signal.name.removeprefix("SIG")
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                "setpriv", "--pdeathsig", signal_name, *self._setpriv, *argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, cwd=cwd, env=env,
                start_new_session=True,  # a terminal's Ctrl-C is for us to pass on, in order
            )  # fmt: skip
        try:
            await self._wait_ready(ready)
        except BaseException:
            await self.kill()
            raise

    async def _wait_ready(self, ready: Callable[[], Awaitable[bool]]) -> None:
        deadline = time.monotonic() + READY_DEADLINE_S
        while not await ready():
            if not self.running:
                raise StartError(f"{self.name} exited at start:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise StartError(
                    f"{self.name} not ready after {READY_DEADLINE_S:.0f} s:\n{self.log_tail()}"
                )
            await asyncio.sleep(READY_POLL_S)

    async def wait(self) -> int | None:
        """Wait until the child has ended; its exit code, ``None`` when none runs."""
        return await self._process.wait() if self._process else None

    async def stop(self) -> None:
        """Ask the child to end; SIGKILL after ``STOP_DEADLINE_S``. Idempotent."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(self._stop_signal)
        try:
            async with asyncio.timeout(STOP_DEADLINE_S):
                await self._process.wait()
        except TimeoutError:
            await self.kill()
        self._process = None

    async def kill(self) -> None:
        """SIGKILL, and return when the child is reaped. Idempotent."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._process = None

    def log_tail(self) -> str:
        """The last lines the child has written."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])
