"""The keeping half of the layer service: holds the FUSE connection over restarts.

Owns: the connection to the kernel and its detached mount, the worker's life. Does not own:
serving. It does as little as it can, so that it need never be restarted itself; and when it
is, the next one takes the connection over from the worker, which outlives it.

The mount has no place in the host's table. It ends when neither keeper nor worker is there.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from services.edge.layers import control, fuse
from services.edge.layers.settings import Settings
from services.edge.machine import kernel
from shared.errors import Conflict, Unavailable, Unsupported

log = logging.getLogger(__name__)

BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 5.0
STEADY_S = 10.0
END_S = 2.0
"""For a worker with nothing open to end after its keeper."""
TAKE_OVER_S = 5.0
MALLOC = ":".join(
    f"glibc.malloc.{name}"
    for name in ("arena_max=1", "mmap_threshold=33554432", "trim_threshold=268435456")
)
"""The worker keeps memory that it had: what is fetched goes through pieces of a MiB, and by the
C library's own rules pages would be given back and had again for each, a quarter of the worker's
time. How much there can be is bounded by its settings."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A FUSE connection: the device, its mount, a name that no other has."""

    device: int
    mount: int
    name: str


def connect() -> Connection:
    """A new connection, its handshake done. Raises ``Unsupported`` without FUSE."""
    try:
        device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        with kernel.FsContext.open("fuse") as fs:
            fs.set("source", "dsec-layers")
            values = {"fd": device, "rootmode": "40000", "user_id": 0, "group_id": 0}
            for key, value in values.items():
                fs.set(key, str(value))
            fs.set("max_read", str(fuse.MAX_READ))
            fs.set_flag("default_permissions")
            mount = fs.mount(
                kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID
            )
        operation, unique, _, body = fuse.request(os.read(device, fuse.REQUEST_BYTES))
        if operation != fuse.INIT:
            raise Unavailable(f"the kernel began with operation {operation}")
        answer = fuse.init_answer(body)
        os.writev(device, [fuse.head(unique, len(answer)), answer])
    except OSError as error:
        raise Unsupported(f"no FUSE connection: {error.strerror}") from error
    return Connection(device, mount, secrets.token_hex(8))


def take_over(root: Path) -> Connection | None:
    """The connection of a worker whose keeper is gone, which then ends."""
    try:
        question = control.Question(ask="hand_over")
        answer, fds = control.ask(root, question, timeout_s=TAKE_OVER_S)
    except OSError:
        return None
    try:
        pid = os.pidfd_open(answer.stats["pid"])
    except ProcessLookupError:  # it has ended already
        pass
    else:
        select.select([pid], [], [], TAKE_OVER_S)  # two workers must not write to one cache
        os.close(pid)
    return Connection(fds[0], fds[1], answer.connection)


class Keeper:
    """One a folder. :meth:`run` returns after :meth:`stop`."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        settings.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings.root.chmod(0o700)
        self._lock = (settings.root / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise Conflict(
                f"another layer service runs on {settings.root}", field="layers_dir"
            ) from None
        self._stopping = threading.Event()
        self._woken, self._wake = os.pipe()
        self._worker: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        self._stopping.set()
        os.write(self._wake, b"x")

    def run(self) -> None:
        """Keeps a worker running until it is told to stop."""
        connection = take_over(self._settings.root) or connect()
        self._forget_others(connection.name)
        delay = BACKOFF_FIRST_S
        hold, held = os.pipe()
        while not self._stopping.is_set():
            began = time.monotonic()
            self._worker = self._spawn(connection, hold)
            code = self._wait()
            if self._stopping.is_set():
                break
            delay = BACKOFF_FIRST_S if time.monotonic() - began > STEADY_S else delay
            log.warning("the worker ended with %s, started again in %.2f s", code, delay)
            self._stopping.wait(delay)
            delay = min(BACKOFF_MAX_S, delay * 2)
        os.close(held)
        self._leave()

    def _forget_others(self, name: str) -> None:
        """Open files of connections that are gone."""
        folder = self._settings.root / "open"
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():
            if path.name != name:
                shutil.rmtree(path, ignore_errors=True)

    def _spawn(self, connection: Connection, pipe: int) -> subprocess.Popen[bytes]:
        given = {
            "FUSE_FD": connection.device, "MOUNT_FD": connection.mount, "KEEPER_FD": pipe,
            "CONNECTION": connection.name,
        }  # fmt: skip
        env = {f"DSEC_LAYERS_{name}": str(value) for name, value in given.items()}
        return subprocess.Popen(
            [sys.executable, "-m", "services.edge.layers.worker"],
            env={"GLIBC_TUNABLES": MALLOC, **os.environ, **env},
            pass_fds=(connection.device, connection.mount, pipe),
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip

    def _wait(self) -> int | None:
        """The worker's exit code; ``None`` when the keeper is to stop first."""
        assert self._worker is not None
        ended = os.pidfd_open(self._worker.pid)
        try:
            select.select([ended, self._woken], [], [])
        finally:
            os.close(ended)
        return None if self._stopping.is_set() else self._worker.wait()

    def _leave(self) -> None:
        """A worker with open layers is left to serve them."""
        if self._worker is None:
            return
        try:
            self._worker.wait(END_S)
        except subprocess.TimeoutExpired:
            log.warning("layers are open: worker %d serves on", self._worker.pid)


def main(settings: Settings) -> None:
    """Runs the keeper until SIGTERM or SIGINT."""
    logging.basicConfig(
        level=settings.log_level, stream=sys.stderr,
        format="%(asctime)s %(levelname)s layers %(name)s: %(message)s",
    )  # fmt: skip
    keeper = Keeper(settings)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: keeper.stop())
    keeper.run()
