"""Paths that the kernel's LSM programs protect, on top of the mounts that hold them.

Owns: the programs of ``guest/bpf/files.bpf.c``, which objects are protected in which
sandbox, telling what was denied. Does not own: which paths (the policy), mounts. Many
kernels have no such programs, or refuse them: then this says why, and mounts are all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from services.edge.egress.hooks import Hooks
from services.edge.egress.libbpf import Map
from services.edge.sensors.inside import find, mount_of, root_of
from shared.policies import Policy

READ, WRITE = 1, 2
HOOKS = (
    "file_open", "path_truncate", "path_chmod", "path_chown", "path_mknod", "path_mkdir",
    "path_symlink", "path_unlink", "path_rmdir", "path_link", "path_rename",
)  # fmt: skip
_GROUP = struct.Struct("<Q")
_PLACE = struct.Struct("<QQII")
_DENIED = struct.Struct("<I")
_EVENT = struct.Struct("<QQIIII16s")


@dataclass(frozen=True, slots=True)
class Protected:
    """One path of a sandbox, and what of it is denied (``READ``, ``WRITE``)."""

    path: str
    rule: str
    denied: int


@dataclass(frozen=True, slots=True)
class Denial:
    """``action`` is ``open`` or ``write``; the process as this machine names it."""

    path: str
    rule: str
    action: str
    pid: int
    uid: int
    comm: str


Heard = Callable[[Denial], None]


@dataclass(slots=True)
class _Held:
    group: int
    heard: Heard
    places: dict[bytes, Protected] = field(default_factory=dict)


def protected(policy: Policy) -> Iterable[Protected]:
    """What of a policy's paths is denied to whom it is about."""
    for rule in policy.read_only:
        yield Protected(rule.path, "files.read_only", WRITE)
    for rule in policy.protected:
        yield Protected(rule.path, "files.protected", WRITE)
    for rule in policy.hidden:
        yield Protected(rule.path, "files.hidden", READ | WRITE)


class Paths:
    """See the module. ``program`` is the object file."""

    def __init__(self, program: Path) -> None:
        self._hooks = Hooks(program, [f"on_{hook}" for hook in HOOKS], self._take)
        self._sandboxes: Map | None = None
        self._protections: Map | None = None
        self._held: dict[str, _Held] = {}

    def probe(self) -> str:
        """What protects paths here. Raises ``Unsupported`` or ``Unavailable``."""
        if self._hooks.open():
            self._sandboxes = self._hooks.map("sandboxes")
            self._protections = self._hooks.map("protections")
        return "BPF LSM"

    def begin(
        self, uid: str, group: Path, pid: int, what: Iterable[Protected], *, heard: Heard
    ) -> None:
        """Protects paths in the root of the process ``pid`` from all in the control group
        ``group`` and below it. What is not there is left out. Raises ``OSError``."""
        self.probe()
        assert self._sandboxes is not None and self._protections is not None
        self.end(uid)
        held = self._held[uid] = _Held(group.stat().st_ino, heard)
        root = root_of(pid)
        try:
            for one in what:
                try:
                    at = find(root, one.path)
                except OSError:
                    continue
                try:
                    key = _PLACE.pack(held.group, *_object(at, pid), 0)
                finally:
                    os.close(at)
                self._protections.set(key, _DENIED.pack(one.denied))
                held.places[key] = one
        finally:
            os.close(root)
        self._sandboxes.set(_GROUP.pack(held.group), _GROUP.pack(0))
        self._hooks.listen()

    def denied(self, uid: str) -> int:
        """How much a sandbox was denied, exactly."""
        assert self._sandboxes is not None
        raw = self._sandboxes.get(_GROUP.pack(self._held[uid].group), _GROUP.size)
        return int(_GROUP.unpack(raw)[0]) if raw else 0

    def end(self, uid: str) -> None:
        """The sandbox is over; one that has none is fine."""
        held = self._held.pop(uid, None)
        if held is None:
            return
        assert self._sandboxes is not None and self._protections is not None
        self._sandboxes.delete(_GROUP.pack(held.group))
        for key in held.places:
            self._protections.delete(key)

    def close(self) -> None:
        """The programs go."""
        for uid in list(self._held):
            self.end(uid)
        self._hooks.close()

    def _take(self, raw: bytes) -> None:
        group, inode, device, pid, uid, denied, comm = _EVENT.unpack(raw[: _EVENT.size])
        key = _PLACE.pack(group, inode, device, 0)
        for held in self._held.values():
            one = held.places.get(key)
            if one is not None:
                name = comm.split(b"\0")[0].decode(errors="replace")
                action = "write" if denied & WRITE else "open"
                held.heard(Denial(one.path, one.rule, action, pid, uid, name))


def _object(at: int, pid: int) -> tuple[int, int]:
    """Inode and device of a descriptor in the mounts of ``pid``, as the kernel itself counts
    them: an overlay tells others in ``stat``."""
    lines = Path(f"/proc/self/fdinfo/{at}").read_text().splitlines()
    inode = next(int(line.split()[1]) for line in lines if line.startswith("ino:"))
    mount = mount_of(at)
    return inode, _device(mount, f"/proc/{pid}/mountinfo")


def _device(mount: int, listed: str) -> int:
    for line in Path(listed).read_text().splitlines():
        number, _, device, *_ = line.split()
        if int(number) == mount:
            major, minor = device.split(":")
            return int(major) << 20 | int(minor)
    raise OSError(f"no mount {mount} in {listed}")
