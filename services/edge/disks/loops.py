"""Loop devices, as far as disks of sandboxes need them.

Owns: binding a file to a free device, telling which file a device has. Does not own: what
is in the file, mounts. A device lets go of its file when nothing uses it any more, so a
process that dies, however it dies, leaves none bound.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

_CTL_GET_FREE, _CONFIGURE, _GET_STATUS64 = 0x4C82, 0x4C0A, 0x4C05
_AUTOCLEAR, _DIRECT_IO = 4, 16
_BLOCK = 4096
_INFO = struct.Struct("5Q4I64s64s32s2Q")
_CONFIG = struct.Struct("2I232s64x")
_IDENTITY = struct.Struct("2Q")
ATTEMPTS = 64
"""Devices tried where others take the free one first."""
POLL_S = 0.002


def bind(path: Path) -> tuple[int, int]:
    """Binds the file; the device's number and a descriptor of it, which keeps it bound.
    Without a second copy in memory where the file system can do that."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(ATTEMPTS):
            number = _free()
            device = os.open(name(number), os.O_RDWR | os.O_CLOEXEC)
            try:
                _configure(device, file)
                return number, device
            except OSError as err:
                os.close(device)
                if err.errno != errno.EBUSY:
                    raise
        raise OSError(errno.EBUSY, "no loop device is free")
    finally:
        os.close(file)


def name(number: int) -> str:
    return f"/dev/loop{number}"


def hold(number: int, path: Path) -> int | None:
    """A descriptor of the device that keeps it bound, ``None`` where it has another file or
    none: numbers are used again."""
    try:
        device = os.open(name(number), os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with suppress(OSError):
        info = bytearray(_INFO.size)
        fcntl.ioctl(device, _GET_STATUS64, info)
        status = path.stat()
        if _IDENTITY.unpack_from(info) == (_encoded(status.st_dev), status.st_ino):
            return device
    os.close(device)
    return None


def released(number: int, path: Path, *, within_s: float) -> bool:
    """Waits until the device has another file or none. Looks without opening it, which
    would keep it bound."""
    until = time.monotonic() + within_s
    while _backing(number) == str(path):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def _backing(number: int) -> str:
    try:
        return Path(f"/sys/block/loop{number}/loop/backing_file").read_text().rstrip("\n")
    except OSError:
        return ""


def _free() -> int:
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        return fcntl.ioctl(control, _CTL_GET_FREE)
    finally:
        os.close(control)


def _configure(device: int, file: int) -> None:
    for flags in (_AUTOCLEAR | _DIRECT_IO, _AUTOCLEAR):
        info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, b"", b"", b"", 0, 0)
        try:
            fcntl.ioctl(device, _CONFIGURE, _CONFIG.pack(file, _BLOCK, info))
            return
        except OSError as err:
            if err.errno != errno.EINVAL or not flags & _DIRECT_IO:
                raise


def _encoded(device: int) -> int:
    """The kernel's wide form of a device's number, as the loop driver tells it."""
    major, minor = os.major(device), os.minor(device)
    return (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)
