"""AppArmor's profiles in this machine's kernel.

Owns: whether there is AppArmor, loading and removing profiles, hearing what they denied.
Does not own: their text (:mod:`services.edge.policy.apparmor`), putting a command under one
(the guest agent does, and a command that cannot be put there does not run).

The kernel is asked, never a container engine: one that is told a profile's name on a
machine without AppArmor says yes, and confines nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

from shared import apparmor
from shared.apparmor import PROFILE_PREFIX, Record
from shared.errors import Unavailable, Unsupported

ENABLED = Path("/sys/module/apparmor/parameters/enabled")
KERNEL = Path("/sys/kernel/security/apparmor")
PARSER = "apparmor_parser"
LOAD_S = 30.0
"""A profile takes 30 ms to compile, and far longer on a busy machine."""
_AUDIT, _READERS = 9, 1  # NETLINK_AUDIT, the group that only reads
_AVC = 1400
_HEADER = struct.Struct("<IHHII")
RECORD_BYTES = 16_384
RECORDS_PER_TURN = 64

Heard = Callable[[str, str, Record], None]
"""Is given a sandbox, the record's line and what it says."""


def in_force() -> bool:
    """Whether this kernel confines by AppArmor."""
    with contextlib.suppress(OSError):
        return ENABLED.read_text().strip() == "Y"
    return False


def probe() -> str:
    """What enforces profiles here. Raises ``Unsupported`` with the reason."""
    if not ENABLED.exists():
        raise Unsupported("the kernel has no AppArmor", field="apparmor")
    if not in_force():
        raise Unsupported("the kernel has AppArmor switched off", field="apparmor")
    if not (KERNEL / ".remove").exists():
        raise Unsupported("securityfs is not mounted", field="apparmor")
    if shutil.which(PARSER) is None:
        raise Unsupported(f"{PARSER} is not installed", field="apparmor")
    return "AppArmor"


def name_of(uid: str) -> str:
    """The profile of a sandbox."""
    return PROFILE_PREFIX + uid


def load(text: str) -> None:
    """Puts a profile into the kernel, or another in its place. Blocking; raises
    ``Unavailable``."""
    try:
        done = subprocess.run(
            [PARSER, "--replace", "--skip-cache"], input=text.encode(), capture_output=True,
            timeout=LOAD_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as err:
        raise Unavailable(f"the AppArmor profile cannot be loaded: {err}") from err
    if done.returncode:
        said = done.stderr[:512].decode(errors="replace").strip()
        raise Unavailable(f"the AppArmor profile cannot be loaded: {said}")


def remove(name: str) -> None:
    """Takes a profile out; one that is not there is fine. Processes that still have it are
    of a sandbox that is ending."""
    with contextlib.suppress(OSError):
        (KERNEL / ".remove").write_bytes(name.encode())


class Hearing:
    """What profiles of sandboxes denied, from the kernel's audit. ``heard``: see above."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        kind = socket.SOCK_RAW | socket.SOCK_NONBLOCK
        self._sock = socket.socket(socket.AF_NETLINK, kind, _AUDIT)
        self._sock.bind((0, _READERS))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sock, self._take)

    def _take(self) -> None:
        for _ in range(RECORDS_PER_TURN):
            try:
                data = self._sock.recv(RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue  # the kernel dropped some: they are denied all the same
            _, kind, *_ = _HEADER.unpack_from(data)
            record = apparmor.netlink(data[_HEADER.size :]) if kind == _AVC else None
            if record is not None and record.sandbox is not None and record.mode == "DENIED":
                line = data[_HEADER.size :].rstrip(b"\0\n").decode(errors="replace")
                self._heard(record.sandbox, line, record)

    def close(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
