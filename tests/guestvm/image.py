"""The machine that `make test-guest` boots: Debian with its own kernel, where AppArmor, BPF
LSM and project quotas are.

Owns: its disk, made once for a list of packages, and its kernel. Does not own: what runs
in it; the repository and this environment's libraries are lent to it read-only.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from demo.baseimage import apt_sources, codename
from demo.cache import cache_dir, make_once

PACKAGES = (
    "apparmor", "busybox-static", "docker.io", "e2fsprogs", "erofs-utils", "iproute2", "kmod",
    "libbpf1", "linux-image-amd64", "mount", "procps", "python3", "quota", "xfsprogs",
)  # fmt: skip
BUILD_TIMEOUT_S = 1200
DISK_MB = 3000
RECIPE = "2"  # counts up when the way of building changes
INIT = """#!/bin/sh
# The repository is lent to this machine, and what else is to be done is in it.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mountpoint -q /proc || mount -t proc proc /proc
mountpoint -q /sys || mount -t sysfs sys /sys
modprobe -a 9pnet_virtio 9p
mount -t 9p -o ro,trans=virtio,version=9p2000.L,msize=512000,cache=loose repository /repository
exec sh /repository/tests/guestvm/init.sh
"""


@dataclass(frozen=True, slots=True)
class Machine:
    """Files to boot from. The disk stays as it is: what a boot writes is thrown away."""

    disk: Path
    kernel: Path
    ramdisk: Path


def machine() -> Machine:
    """Made when it is not cached: three minutes, and needs root."""
    key = hashlib.sha256(f"{RECIPE} {codename()} {PACKAGES} {INIT}".encode())
    entry = make_once(cache_dir() / "guestvm" / key.hexdigest()[:16], _build)
    return Machine(entry / "disk.ext4", entry / "vmlinuz", entry / "initrd")


def _build(folder: Path) -> None:
    root = folder / "root"
    argv = [
        "mmdebstrap", "--mode=root", "--variant=minbase", "--quiet",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        f"--include={','.join(PACKAGES)}", codename(), str(root), str(apt_sources()),
    ]  # fmt: skip
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"mmdebstrap exited with {done.returncode}:\n{done.stderr[-3000:]}")
    (root / "dsec-init").write_text(INIT)
    (root / "dsec-init").chmod(0o755)
    for name in ("repository", "site", "out"):
        (root / name).mkdir()
    for name, pattern in (("vmlinuz", "vmlinuz-*"), ("initrd", "initrd.img-*")):
        shutil.copy2(next((root / "boot").glob(pattern)), folder / name)
    subprocess.run(
        ["mke2fs", "-q", "-t", "ext4", "-d", root, folder / "disk.ext4", f"{DISK_MB}M"], check=True
    )
    shutil.rmtree(root)
