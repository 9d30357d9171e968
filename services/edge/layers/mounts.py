"""EROFS layers as detached mounts, and root file systems composed of them.

Owns: one mount per layer and node, counted by use; the overlay of a sandbox. Does not
own: getting layers onto the node, the sandbox that uses a root. A mount here is a
descriptor and stands in no mount table: when this process dies, however it dies,
nothing of it is left but what sandboxes still use. One mount per layer, because two
mounts of one file would keep its pages in memory twice.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.edge.drivers.base import Layer
from services.edge.machine import kernel
from shared.errors import InvalidRequest, Unavailable

LAYERS_MAX = 500  # the kernel's own bound for overlay
PIECE_BYTES = 1024  # of what the kernel says of mounts, which it writes as far as is read


@dataclass(slots=True)
class _Held:
    lock: threading.Lock
    fd: int = -1
    uses: int = 0


class LayerMounts:
    """The layer mounts of this process. Thread-safe; a layer wanted by many at once is
    mounted once."""

    def __init__(self, *, idle_max: int = 64) -> None:
        self._held: dict[tuple[str, str], _Held] = {}
        self._lock = threading.Lock()
        self._idle_max = idle_max

    def acquire(self, layer: Layer) -> int:
        """The descriptor of the layer's mount, to be given back by :meth:`release`.
        Raises ``Unavailable`` (cause ``image``) when it cannot be mounted."""
        with self._lock:
            held = self._held.setdefault(_key(layer), _Held(threading.Lock()))
            held.uses += 1
        try:
            with held.lock:
                if held.fd < 0:
                    held.fd = mount_erofs(layer)
                return held.fd
        except OSError as err:
            self.release(layer)
            raise Unavailable(
                f"layer {layer.digest} cannot be mounted: {err.strerror}", cause="image"
            ) from err

    def release(self, layer: Layer) -> None:
        with self._lock:
            held = self._held.get(_key(layer))
            if held is not None:
                held.uses -= 1
        self._trim(self._idle_max)

    def close(self) -> None:
        """Lets go of every mount nobody uses."""
        self._trim(0)

    def __len__(self) -> int:
        return sum(1 for held in self._held.values() if held.fd >= 0)

    def _trim(self, keep: int) -> None:
        """Unused mounts stay warm up to a bound, the oldest go first."""
        with self._lock:
            idle = [key for key, held in self._held.items() if held.uses <= 0]
            for key in idle[: max(0, len(idle) - keep)]:
                held = self._held.pop(key)
                if held.fd >= 0:
                    os.close(held.fd)


def _key(layer: Layer) -> tuple[str, str]:
    return layer.digest, layer.origin  # another connection is another mount


def mount_erofs(layer: Layer) -> int:
    """A detached read-only mount straight from the file, no loop device."""
    with kernel.FsContext.open("erofs") as fs:
        fs.set("source", layer.meta)
        if layer.data is not None:
            fs.set("device", layer.data)
        if layer.origin:
            # its pages would be kept twice: as this file system's and as FUSE's
            fs.set_flag("directio")
        fs.set_flag("ro")
        return fs.mount(kernel.MOUNT_ATTR_RDONLY | kernel.MOUNT_ATTR_NODEV)


@dataclass(frozen=True, slots=True)
class Upper:
    """The writable part of a sandbox: ``upper`` and ``work`` under one folder."""

    folder: Path

    @property
    def upper(self) -> Path:
        return self.folder / "upper"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    def make(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.upper.mkdir(mode=0o755)
        self.work.mkdir(mode=0o700)


def compose(
    mounts: LayerMounts, layers: Sequence[Layer], upper: Upper, *,
    above: Sequence[Path] = (), below: Sequence[Path] = (),
) -> int:  # fmt: skip
    """A detached, writable overlay of ``layers`` and the folders ``above`` and ``below`` them
    (each bottom to top) with ``upper`` on top. What is written there means the same elsewhere:
    nothing of it refers to another layer.

    The overlay keeps its own references to the layers, so they are given back at
    once. Raises ``InvalidRequest`` (``layers``) for none or too many and
    ``Unavailable`` when the kernel refuses or the result cannot be written."""
    if not 0 < len(layers) <= LAYERS_MAX - len(above) - len(below):
        raise InvalidRequest(f"1 to {LAYERS_MAX} layers are possible", field="layers")
    held: list[Layer] = []
    try:
        with kernel.FsContext.open("overlay") as fs:
            for folder in reversed(above):
                fs.set("lowerdir+", str(folder))
            for layer in reversed(layers):
                fs.set_fd("lowerdir+", mounts.acquire(layer))
                held.append(layer)
            for folder in reversed(below):
                fs.set("lowerdir+", str(folder))
            fs.set("upperdir", str(upper.upper))
            fs.set("workdir", str(upper.work))
            fs.set("redirect_dir", "nofollow")
            fs.set("metacopy", "off")
            fs.set_flag("volatile")
            root = fs.mount(kernel.MOUNT_ATTR_NODEV)
    except OSError as err:
        raise Unavailable(f"the root cannot be composed: {err.strerror}", cause="image") from err
    finally:
        for layer in held:
            mounts.release(layer)
    if os.fstatvfs(root).f_flag & os.ST_RDONLY:
        os.close(root)
        raise Unavailable("the composed root cannot be written to", cause="runtime")
    return root


def lower_count(pid: int) -> int:
    """How many lower layers the root mount of process ``pid`` really has."""
    fd = os.open(f"/proc/{pid}/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = b""
        while piece := os.read(fd, PIECE_BYTES):  # a root is the oldest
            *lines, text = (text + piece).split(b"\n")
            for line in lines:
                if line.split(b" ", 5)[4] == b"/" and b" - overlay " in line:
                    return _lower_count(os.fsdecode(line.rsplit(b" ", 1)[1]))
    finally:
        os.close(fd)
    return 0


def _lower_count(options: str) -> int:
    plus = len(re.findall(r"(?:^|,)lowerdir\+=", options))
    if plus:
        return plus
    plain = re.search(r"(?:^|,)lowerdir=([^,]*)", options)
    return len(re.split(r"(?<!\\):", plain.group(1))) if plain else 0
