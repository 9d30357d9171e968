"""Disks as ext4 images: a sparse file a sandbox, mounted through a loop device.

Owns: making one fast, mounting it again, giving it up. Does not own: sizes (plan), loop
devices (loops), what is written there.

A mount here is a descriptor and stands in no mount table: the overlay of a sandbox keeps
its own reference, and with the sandbox's last process the mount, the device's binding and,
when its folder is removed, the file are gone. A file system is made once for each size and
then copied, a few blocks. It has no journal: what is on it does not outlive the machine.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from services.edge.disks import loops, plan
from services.edge.disks.plan import Found, Room
from services.edge.machine import kernel
from shared.errors import Unavailable

log = logging.getLogger(__name__)

NAME = "disk.img"
MAKE_S = 60.0
GONE_S = 10.0
"""A device lets go of its file some milliseconds after the last process."""
TEMPLATES_MAX = 32
TEMPLATE_BYTES_MAX = 4 * 1024 * 1024
"""Larger ones (disks of many TiB) are made each time."""
_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2

Template = list[tuple[int, bytes]]
"""What a fresh file system has where: offset and content."""


class Images:
    """The image disks of one driver. Thread-safe."""

    def __init__(self, scratch: Path) -> None:
        """``scratch``: a folder on the file system on which the disks will be."""
        self._scratch = scratch
        self._templates: OrderedDict[Room, Template] = OrderedDict()
        self._lock = threading.Lock()

    def probe(self) -> Found:
        """Whether one can be made, mounted and let go of: it is tried."""
        if shutil.which("mkfs.ext4") is None:
            return Found(False, "there is no mkfs.ext4 (e2fsprogs)")
        room = Room(plan.DISK_MB_MIN, plan.INODES_MIN)
        folder = Path(tempfile.mkdtemp(dir=self._scratch))
        try:
            mount, number = self.make(folder, room)
            free = os.fstatvfs(mount)
            os.close(mount)
            if free.f_bavail * free.f_frsize < room.disk_mb * plan.MIB:
                return Found(False, "a disk's file system leaves less than its size")
            self.gone(folder, number)
        except OSError as err:
            return Found(False, f"no disk can be mounted from a file: {err.strerror or err}")
        except Unavailable as err:
            return Found(False, err.message)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return Found(True)

    def make(self, folder: Path, room: Room) -> tuple[int, int]:
        """A new, empty disk in ``folder``: the descriptor of its mount and the number of
        its device. Raises ``OSError``; then the device has let go of what is left."""
        path = folder / NAME
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            template = self._template(room)
            os.ftruncate(file, plan.image_bytes(room))
            for offset, content in template:
                os.pwrite(file, content, offset)
        finally:
            os.close(file)
        number, device = loops.bind(path)
        try:
            return _mount(number), number
        finally:
            os.close(device)

    def again(self, folder: Path, number: int) -> int:
        """One more mount of a disk that is in use. Raises ``Unavailable``."""
        device = loops.hold(number, folder / NAME)
        if device is None:
            raise Unavailable("the sandbox's disk is not mounted any more", cause="runtime")
        try:
            return _mount(number)
        finally:
            os.close(device)

    def give_up(self, folder: Path, number: int) -> None:
        """Its processes are about to be killed: from now on nothing is written there, and
        what is still to be written is dropped rather than waited for."""
        try:
            mount = self.again(folder, number)
        except (OSError, Unavailable):
            return  # it is gone already
        try:
            root = os.open(f"/proc/self/fd/{mount}", os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
            finally:
                os.close(root)
        except OSError as err:
            log.warning("a disk is written to its end: %s", err)
        finally:
            os.close(mount)

    def gone(self, folder: Path, number: int) -> None:
        """Waits until the device has let go, so that removing the file frees its room."""
        if not loops.released(number, folder / NAME, within_s=GONE_S):
            log.warning("%s still has the file of a removed disk", loops.name(number))

    def _template(self, room: Room) -> Template:
        with self._lock:
            known = self._templates.get(room)
            if known is not None:
                self._templates.move_to_end(room)
                return known
            made = _fresh(room, self._scratch)
            if sum(len(content) for _, content in made) <= TEMPLATE_BYTES_MAX:
                self._templates[room] = made
                while len(self._templates) > TEMPLATES_MAX:
                    self._templates.popitem(last=False)
            return made


def _mount(number: int) -> int:
    with kernel.FsContext.open("ext4") as fs:
        fs.set("source", loops.name(number))
        fs.set_flag("discard")  # what the sandbox deletes is the node's again
        fs.set_flag("noinit_itable")
        return fs.mount(kernel.MOUNT_ATTR_NODEV | kernel.MOUNT_ATTR_NOSUID)


def _fresh(room: Room, scratch: Path) -> Template:
    """What a new file system of that size consists of."""
    with tempfile.NamedTemporaryFile(dir=scratch) as file:
        file.truncate(plan.image_bytes(room))
        argv = [
            "mkfs.ext4", "-q", "-F", "-b", str(plan.BLOCK), "-I", str(plan.INODE), "-m", "0",
            "-N", str(plan.image_inodes(room)), "-O", "^has_journal,^resize_inode",
            "-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", file.name,
        ]  # fmt: skip
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, timeout=MAKE_S, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as err:
            raise Unavailable(f"mkfs.ext4: {err}", cause="runtime") from err
        if done.returncode:
            said = done.stderr[:512].decode(errors="replace").strip()
            raise Unavailable(f"mkfs.ext4: {said}", cause="runtime")
        return _content(file.fileno())


def _content(fd: int) -> Template:
    found: Template = []
    end, at = os.fstat(fd).st_size, 0
    while at < end:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as err:
            if err.errno == errno.ENXIO:  # holes up to the end
                break
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        content = os.pread(fd, at - start, start)
        if content.strip(b"\0"):
            found.append((start, content))
    return found
