"""The whole system on loopback in one command: ``python -m services.local``.

Owns: which processes run with which environment, in which order they come and go, and
the files that tell a client how to connect. Does not own: the servers
(:mod:`devstack`) or anything a service does. Every service runs as a process of its
own, exactly as in production; only the machines are missing.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from devstack import COMPONENTS, Infra
from devstack.process import StartError, free_port
from devstack.supervised import Supervised
from services import localconfig, localkeeper
from shared import lifecycle

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
CONTROL = ("auth", "scheduler", "imagesvc", "audit", "burst")
"""In the order in which they start; they end in the reverse of it."""
MODULES = {"layers": "edge.layers"}
"""Where a process is not called as its module is."""
ALIVE = sorted(set(lifecycle.STATES) - lifecycle.TERMINAL)
CLEARED_S, CLEARED_LOOK_S = 60.0, 0.1
"""Longest wait until one that was killed on the same state is tidied up after."""
END_SANDBOXES_S = 30.0
"""Longest wait, at the end, for sandboxes to stop."""
DRIVERS = ("container", "fake", "fncall", "microvm", "vm")


@dataclass(frozen=True, kw_only=True)
class LocalOptions:
    """``driver``: a name or several; every node runs them all. ``nodes`` above 1 only
    with ``fake``: other backends share one kernel. ``state_dir`` keeps everything and
    is reused. ``image_roots`` are the folders that images may be imported from.
    ``ready_s`` bounds the start of each group. ``env`` is added to every
    service's environment. ``keep_sandboxes``: the end leaves them running, and the
    next start on the same ``state_dir`` finds them again. ``trace`` collects
    spans in ``<state_dir>/trace.jsonl``."""

    driver: str | Sequence[str] = "container"
    nodes: int = 1
    state_dir: Path | None = None
    image_roots: Sequence[Path] = ()
    ready_s: float = 90.0
    log_level: str = "INFO"
    trace: bool = False
    keep_sandboxes: bool = False
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def drivers(self) -> tuple[str, ...]:
        """The drivers as a tuple."""
        return (self.driver,) if isinstance(self.driver, str) else tuple(self.driver)

    def check(self) -> None:
        """Raises ``ValueError`` that names what cannot be."""
        unknown = [name for name in self.drivers if name not in DRIVERS]
        if unknown or not self.drivers:
            raise ValueError(f"driver: {unknown or 'none'} is not one of {', '.join(DRIVERS)}")
        if self.nodes < 1 or (self.nodes > 1 and set(self.drivers) != {"fake"}):
            raise ValueError("nodes: more than one node is only possible with driver fake")


def default_state_dir() -> Path:
    """``$XDG_STATE_HOME/dsec/local``."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(base) / "dsec/local"


class LocalSystem:
    """The running system. ``async with LocalSystem(LocalOptions(driver="fake")) as system``.

    Start it from a thread that lives as long as it does: the kernel ends children with
    the thread that started them."""

    def __init__(self, options: LocalOptions | None = None) -> None:
        self.options = options or LocalOptions()
        self.options.check()
        self.state_dir = (self.options.state_dir or default_state_dir()).resolve()
        self.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._up = False
        self._lock: Any = None
        self._infra: Infra | None = None
        self._children: dict[str, Supervised] = {}
        self._access: localconfig.Access | None = None
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def infra(self) -> Infra:
        """The embedded servers."""
        if self._infra is None:
            raise RuntimeError("the local system is not started")
        return self._infra

    @property
    def url(self) -> str:
        """Where clients connect."""
        return self.infra.endpoints.nats_url

    @property
    def admin_key(self) -> str:
        """The administrator's API key."""
        return self._known.admin_key

    @property
    def project(self) -> str:
        """The root project."""
        return self._known.project

    @property
    def _known(self) -> localconfig.Access:
        if self._access is None:
            raise RuntimeError("the local system is not started")
        return self._access

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the processes, in the order of their start; edges are ``edge-<node>``."""
        return tuple(self._children)

    @property
    def logs(self) -> dict[str, Path]:
        """Where each process writes."""
        servers = {name: self.state_dir / f"infra/{name}.log" for name in COMPONENTS}
        return servers | {name: child.log_file for name, child in self._children.items()}

    def pids(self) -> dict[str, int | None]:
        """Process id of each process, servers included; ``None`` while it is down."""
        servers = {name: self.infra.pid(name) for name in COMPONENTS}
        return servers | {name: child.pid for name, child in self._children.items()}

    def table(self) -> list[dict[str, Any]]:
        """What runs where: rows of name, pid, health port (0: none), log."""
        ports = {name: child.health_port for name, child in self._children.items()}
        return [
            {"name": n, "pid": p, "health_port": ports.get(n, 0), "log": str(self.logs[n])}
            for n, p in self.pids().items()
        ]

    async def start(self) -> None:
        """Brings everything up. When something fails, nothing is left running."""
        self._lock = await _only_one(self.state_dir / "lock")
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        self._infra = Infra(self.state_dir / "infra")
        endpoints = await self._infra.start()
        secrets = localconfig.load_secrets(self.state_dir / "secrets.json", CONTROL)
        dsns = await localconfig.migrate(endpoints.pg_dsn_admin, secrets.pg_passwords)
        common = localconfig.Common(
            endpoints=endpoints, dsns=dsns, state_dir=self.state_dir, options=self.options,
            secret_key=secrets.secret_key,
        )  # fmt: skip
        await localconfig.upgrade_bus(common)
        self._access = await localconfig.bootstrap(common, self._nodes())
        await self._launch({name: common.service(name) for name in CONTROL})
        edges = {
            f"edge-{node}": common.edge(node, self._access.node_keys[node], self.options.drivers)
            for node in self._nodes()
        }
        if common.remote_store:
            await self._launch({"layers": common.layers()})
        if not self.options.keep_sandboxes:
            self._keep(edges)
        await self._launch(edges)
        localconfig.write_client_files(self.state_dir, self.url, self._access)
        self._up = True

    def _keep(self, edges: Mapping[str, Mapping[str, str]]) -> None:
        """From now on, a death of this process ends its sandboxes, too."""
        empty = {"DSEC_CONTAINER_POOL_SIZE": "0"}
        plan = {
            "lock": str(self.state_dir / "lock"), "cwd": str(ROOT),
            "edges": {name: {**env, **empty} for name, env in edges.items()},
        }  # fmt: skip
        logs = self.state_dir / "logs"
        self._keeper = localkeeper.start(plan, log=logs / "keeper.log")

    def _nodes(self) -> list[str]:
        return node_names(self.state_dir, self.options.nodes)

    async def _launch(self, environments: Mapping[str, Mapping[str, str]]) -> None:
        group = [self._child(name, env) for name, env in environments.items()]
        for child in group:
            await child.launch()
        await asyncio.gather(*(child.wait_ready(self.options.ready_s) for child in group))

    def _child(self, name: str, env: Mapping[str, str]) -> Supervised:
        port = free_port()
        module = "edge" if name.startswith("edge-") else MODULES.get(name, name)
        logs = self.state_dir / "logs"
        logs.mkdir(exist_ok=True)
        child = Supervised(
            name, [sys.executable, "-m", f"services.{module}"],
            {**env, "DSEC_HEALTH_PORT": str(port)},
            log_file=logs / f"{name}.log", health_port=port, cwd=ROOT,
        )  # fmt: skip
        self._children[name] = child
        return child

    async def stop(self) -> None:
        """Ends everything, the last started first. Idempotent."""
        if self._up and not self.options.keep_sandboxes:
            await self._end_sandboxes()
        self._up = False
        edges = [c for n, c in self._children.items() if n.startswith("edge-")]
        await asyncio.gather(*(child.stop() for child in edges))
        others = [c for c in self._children.values() if c not in edges]
        # they share nothing but the servers, which outlive them
        await asyncio.gather(*(child.stop() for child in reversed(others)))
        self._children.clear()
        if self._infra is not None:
            await self._infra.stop()
        if self._keeper is not None:
            await asyncio.to_thread(localkeeper.end, self._keeper)
            self._keeper = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    async def _end_sandboxes(self) -> None:
        """Stops what still runs, in all projects: edges leave sandboxes alive."""
        from libdsec import DSecClient, DSecError  # only here: a client like any other

        try:
            async with asyncio.timeout(END_SANDBOXES_S):
                make = partial(DSecClient, url=self.url, api_key=self.admin_key)
                async with make(project=self.project) as client:
                    projects = [project.id for project in await client.projects.list()]
                for project in projects:
                    async with make(project=project) as client:
                        alive = [s async for s in client.list(state=ALIVE)]
                        await client.stop_many(alive)
        except (DSecError, TimeoutError) as exc:
            log.warning("sandboxes may be left: %s", exc or type(exc).__name__)

    async def kill(self, name: str) -> None:
        """SIGKILL one process of :attr:`services`; it stays down until :meth:`restart`."""
        await self._children[name].kill()

    async def restart(self, name: str) -> None:
        """Stops one process where it runs, starts it, waits until it is ready."""
        child = self._children[name]
        await child.stop()
        await child.launch()
        await child.wait_ready(self.options.ready_s)

    async def restart_infra(self, name: str, *, kill: bool = False) -> None:
        """Restarts ``nats``, ``postgres`` or ``valkey`` on the same port; with ``kill``
        by SIGKILL first. Returns when the server answers, the services may lag."""
        if kill:
            await self.infra.kill(name)
        await self.infra.restart(name)

    async def wait_ready(self, within_s: float | None = None) -> None:
        """Returns when every process that is meant to run is ready (again)."""
        limit = within_s or self.options.ready_s
        await asyncio.gather(*(child.wait_ready(limit) for child in self._children.values()))

    async def __aenter__(self) -> LocalSystem:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.stop()


def node_names(state_dir: Path, count: int) -> list[str]:
    """Names that two systems on one machine do not share: a node clears away what
    carries its name."""
    mark = hashlib.sha256(str(state_dir).encode()).hexdigest()[:6]
    return [f"local-{mark}-{number}" for number in range(1, count + 1)]


async def _only_one(path: Path) -> Any:
    file = path.open("a+")  # held as long as the system runs
    end = time.monotonic() + CLEARED_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if path.read_text() != localkeeper.CLEARING or time.monotonic() > end:
                file.close()
                raise StartError(f"{path.parent}: another local system runs there") from None
            await asyncio.sleep(CLEARED_LOOK_S)
    file.truncate(0)
    os.set_inheritable(file.fileno(), False)
    return file


__all__ = ["LocalOptions", "LocalSystem"]

if __name__ == "__main__":
    from services.localcli import main

    main()
