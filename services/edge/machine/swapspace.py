"""Swap for the memory of paused sandboxes, where the edge may make some.

Owns: one bounded zram device or swap file per edge: making it, knowing it again after a
restart, removing it when nothing lies in it. Does not own: who swaps
(:mod:`services.edge.machine.reclaim`), swap that the machine has anyway; that is never touched.
Blocking; called in threads.

Swap serves the whole machine: under pressure the kernel may put anybody's memory into
it. So it is made only where the node's settings say so. What was made is noted in a file
beside the state, before it is in use: an edge that was killed finds it. Of a zram device only
the kernel knows the number, and only once there is one, which bears no mark of whose it is: so
a process of its own makes and notes it, which the edge's death does not end, and for which the
next edge waits.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.edge.machine import kernel
from shared.errors import InvalidRequest

log = logging.getLogger(__name__)

Mode = Literal["host", "zram", "file"]
MODES: tuple[Mode, ...] = ("host", "zram", "file")
NOTE = "swap.json"
FILE = "swap"
CONTROL = Path("/sys/class/zram-control")
DEVICE_S = 5.0
MKSWAP_S = 30.0
PATH = {"PATH": "/usr/sbin:/sbin:/usr/bin:/bin"}
ADD_ZRAM = """
trap '' HUP INT TERM
number=$(cat "$1/hot_add") || exit
{ printf '{"mode": "zram", "path": "/dev/zram%d"}' "$number" >"$2.part" && mv "$2.part" "$2"; } || {
    echo "$number" >"$1/hot_remove"
    exit 1
}
"""
"""For ``sh``, with the control's folder and the note's path."""
PRIORITY = {"zram": 100, "file": 10}
COMPRESSOR = "lz4"
"""Of zram: half the time of the kernel's usual one, for some more memory."""
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Swap:
    """Whether anonymous memory of paused sandboxes can be swapped, and why (not)."""

    usable: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of /proc/swaps: sizes in bytes."""

    path: str
    size: int
    used: int


def entries(text: str) -> list[Entry]:
    """The content of /proc/swaps."""
    rows = (line.split() for line in text.splitlines()[1:])
    return [
        Entry(row[0].replace("\\040", " "), int(row[2]) * 1024, int(row[3]) * 1024)
        for row in rows
        if len(row) >= 5
    ]


class SwapSpace:
    """The swap of one edge. ``folder`` is where its note and file lie."""

    def __init__(self, folder: Path, mode: str, size_mb: int) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"swap: one of {', '.join(MODES)}", field="swap")
        self._folder = folder
        self._mode = mode
        self._size = size_mb * MIB
        self.state = Swap(False, "it was not looked for yet")

    def open(self) -> Swap:
        """Makes it, or finds what an earlier process made. Never raises: where it cannot
        be made, the reason says why."""
        try:
            with self._alone():
                return self._open()
        except OSError as err:
            self.state = Swap(False, f"no swap: {_said(err)}")
            log.warning("%s", self.state.reason)
            return self.state

    def _open(self) -> Swap:
        made = self._noted()
        if made is not None and (made["mode"] != self._mode or not _active(made["path"])):
            if not self._remove(made):
                return self.look()  # noted for the next edge, not forgotten for another one
            made = None
        if self._mode != "host" and made is None:
            try:
                self._make()
            except (OSError, subprocess.SubprocessError, ValueError) as err:
                self._undo_made()
                self.state = Swap(False, f"no swap: {self._mode} cannot be set up: {_said(err)}")
                log.warning("%s", self.state.reason)
                return self.state
        return self.look()

    def look(self) -> Swap:
        """What there is now."""
        found = _entries()
        if not found:
            self.state = Swap(False, "no swap: the machine has none and none is configured")
            return self.state
        size_mb = sum(entry.size for entry in found) // MIB
        self.state = Swap(True, f"{self._mode} swap, {size_mb} MB")
        return self.state

    def close(self, *, keep_used: bool) -> bool:
        """Removes what this edge made; ``keep_used``: unless memory lies in it, which
        the next edge finds. Returns whether nothing is left."""
        made = self._noted()
        if made is None:
            return True
        if keep_used and any(e.path == made["path"] and e.used for e in _entries()):
            return False
        return self._remove(made)

    # -- what was made ------------------------------------------------------------

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """While nothing else makes swap here: what an edge that was killed has begun is
        finished first. Raises ``OSError``."""
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            deadline = time.monotonic() + MKSWAP_S
            while True:
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise OSError("an earlier edge still makes some") from None
                    time.sleep(0.05)
            yield
        finally:
            os.close(self._lock)

    def _noted(self) -> dict[str, str] | None:
        try:
            note = json.loads((self._folder / NOTE).read_text())
            return {"mode": str(note["mode"]), "path": str(note["path"])}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _note(self, path: str) -> None:
        part = self._folder / (NOTE + ".part")
        part.write_text(json.dumps({"mode": self._mode, "path": path}))
        part.rename(self._folder / NOTE)

    def _make(self) -> None:
        path = self._make_zram() if self._mode == "zram" else self._make_file()
        subprocess.run(
            ["mkswap", path], check=True, capture_output=True, timeout=MKSWAP_S,
            env=PATH,
        )  # fmt: skip
        kernel.swapon(path, PRIORITY[self._mode])

    def _make_zram(self) -> str:
        subprocess.run(
            ["sh", "-c", ADD_ZRAM, "sh", CONTROL, self._folder / NOTE], check=True,
            capture_output=True, env=PATH, start_new_session=True, pass_fds=[self._lock],
            timeout=MKSWAP_S,
        )  # fmt: skip
        made = self._noted()
        if made is None:
            raise OSError(f"{self._folder / NOTE} cannot be read")
        device = Path(made["path"])
        with contextlib.suppress(OSError):  # a kernel without it: its own choice
            (_sysfs(str(device)) / "comp_algorithm").write_text(COMPRESSOR)
        (_sysfs(str(device)) / "disksize").write_text(str(self._size))
        deadline = time.monotonic() + DEVICE_S
        while not device.exists():
            if time.monotonic() > deadline:
                raise OSError(f"{device} does not appear")
            time.sleep(0.01)
        return str(device)

    def _make_file(self) -> str:
        path = self._folder / FILE
        self._note(str(path))
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size)
        finally:
            os.close(fd)
        return str(path)

    def _undo_made(self) -> None:
        made = self._noted()
        if made is not None:
            self._remove(made)

    def _remove(self, made: dict[str, str]) -> bool:
        path = made["path"]
        try:
            if _active(path):
                kernel.swapoff(path)
            if made["mode"] == "file":
                Path(path).unlink(missing_ok=True)
            elif _sysfs(path).exists():
                (_sysfs(path) / "reset").write_text("1")
                (CONTROL / "hot_remove").write_text(Path(path).name.removeprefix("zram"))
            (self._folder / NOTE).unlink(missing_ok=True)
        except OSError as err:
            log.error("swap at %s cannot be removed: %s", path, err)
            return False
        return True


def _sysfs(device: str) -> Path:
    return Path("/sys/block", Path(device).name)


def _entries() -> list[Entry]:
    with contextlib.suppress(OSError):
        return entries(Path("/proc/swaps").read_text())
    return []


def _active(path: str) -> bool:
    return any(entry.path == path for entry in _entries())


def _said(err: Exception) -> str:
    if isinstance(err, subprocess.CalledProcessError):
        return bytes(err.stderr or b"").decode(errors="replace").strip()[:200]
    return str(err)[:200]
