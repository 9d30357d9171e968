"""A layer service over a real S3 server, and layers in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from devstack.proxy import Proxy
from services.edge.drivers.base import Layer
from services.edge.layers.client import LayerService
from services.edge.layers.mounts import mount_erofs
from services.imagesvc.importer import Importer
from services.imagesvc.sources import ImportRequest, PathSource
from shared.blobs.opening import StoreSettings, open_store
from tests.s3server import S3Server

REPOSITORY = Path(__file__).parents[3]
WAIT_S = 60.0


def eventually(condition: Callable[[], object], within_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@dataclass
class Node:
    """The layer service of a test, and its store behind a proxy."""

    folder: Path
    s3: S3Server
    proxy: Proxy
    env: dict[str, str] = field(default_factory=dict)
    keepers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)
    workers: set[int] = field(default_factory=set)

    @property
    def root(self) -> Path:
        return self.folder / "layers"

    @property
    def service(self) -> LayerService:
        return LayerService(self.root, prepare_s=WAIT_S)

    @property
    def prefix(self) -> str:
        return self.folder.name

    def start(self, **settings: object) -> None:
        """A keeper; ``settings`` of the service by their names, kept for the next one."""
        store = self.s3.settings(self.prefix) | {"store_endpoint": self.proxy.endpoint}
        self.env |= {f"DSEC_{k.upper()}": str(v) for k, v in (store | settings).items()}
        env = {**os.environ, **self.env, "DSEC_LAYERS_DIR": str(self.root)}
        with (self.folder / "layers.log").open("ab") as log:
            self.keepers.append(
                subprocess.Popen(
                    [sys.executable, "-m", "services.edge.layers"], env=env, cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                )
            )  # fmt: skip
        self.pid()

    def pid(self) -> int:
        """The worker's; waits for one."""
        pid = self.service.stats()["pid"]
        self.workers.add(pid)
        return pid

    def put(self, name: str, files: dict[str, bytes]) -> str:
        """A layer of ``files`` in the store; its digest."""
        tree = self.folder / name
        tree.mkdir()
        for file, content in files.items():
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_bytes(content)
        store = open_store(
            StoreSettings(**self.s3.settings(self.prefix)),  # type: ignore[arg-type]
            scratch=self.folder / "scratch",
        )
        importer = Importer(store)
        try:
            return importer.run_blocking(ImportRequest(PathSource(tree))).layers[0]
        finally:
            importer.close()

    def key(self, digest: str, name: str) -> str:
        return f"{self.prefix}/layers/{digest}/{name}"

    def change(self, digest: str, name: str, at: int) -> bytes:
        """Damages one of a layer's objects in the store; what it was before."""
        before = self.s3.get(self.key(digest, name))
        damaged = before[:at] + bytes([before[at] ^ 0xFF]) + before[at + 1 :]
        self.s3.put(self.key(digest, name), damaged)
        return before

    def layer(self, digest: str) -> Layer:
        return self.service.prepare([digest])[0]

    def mount(self, digest: str) -> Path:
        """The layer as this process sees it, until :meth:`unmount` or the end."""
        service = self.service
        self.fds.append(mount_erofs(service.prepare([digest])[0]))
        service.close()
        return Path(f"/proc/self/fd/{self.fds[-1]}")

    def unmount(self) -> None:
        while self.fds:
            os.close(self.fds.pop())

    def stop_keeper(self, number: int = signal.SIGTERM) -> None:
        keeper = self.keepers.pop()
        keeper.send_signal(number)
        keeper.wait(WAIT_S)

    def stop(self) -> None:
        """Nobody reads and nobody keeps: returns when the worker has ended."""
        pid = self.pid()
        self.unmount()
        self.stop_keeper()
        eventually(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forget_pages(path: Path) -> None:
    """Drops a file's pages, so that the next read asks the service."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.fixture
def node(tmp_path: Path, s3: S3Server) -> Iterator[Node]:
    """Ends with a check that nothing is left."""
    connections = set(os.listdir("/sys/fs/fuse/connections"))
    mounts = Path("/proc/self/mountinfo").read_text().count(" fuse")
    made = Node(tmp_path, s3, Proxy(s3.port))
    try:
        yield made
    finally:
        made.unmount()
        while made.keepers:
            made.stop_keeper()
        made.proxy.mode = "away"
        made.proxy.close()
    eventually(lambda: not any(alive(pid) for pid in made.workers))
    eventually(lambda: Path("/proc/self/mountinfo").read_text().count(" fuse") <= mounts)
    eventually(lambda: set(os.listdir("/sys/fs/fuse/connections")) <= connections)
