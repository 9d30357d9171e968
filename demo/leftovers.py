"""What a run left on the machine: the difference of two snapshots.

Owns: containers with our label, mounts, cgroups, network namespaces, processes that
carry our names. Does not own: rows in the database (the client's list says that).
"""

from __future__ import annotations

import os
from pathlib import Path

import docker
from docker.errors import DockerException

_NAMES = ("nats-server", "postgres", "valkey-server", "services.", "aether")


def snapshot() -> frozenset[str]:
    """One line per thing of ours that is there now."""
    return frozenset([*_containers(), *_mounts(), *_cgroups(), *_namespaces(), *_processes()])


def _containers() -> list[str]:
    try:
        engine = docker.from_env(timeout=30)
        found = engine.api.containers(all=True, filters={"label": "dsec.node"})
    except DockerException:
        return []
    return [f"container {one['Id'][:12]}" for one in found]


def _mounts() -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [f"mount {line.split()[1]}" for line in lines if "dsec" in line]


def _cgroups() -> list[str]:
    found = []
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        if root.count("/") > 5:
            folders.clear()
        found += [f"cgroup {root}/{name}" for name in folders if "dsec" in f"{root}/{name}"]
    # the parent that Docker made for our containers stays, empty, like Docker's own
    return [line for line in found if line.count("/") > 5]


def _namespaces() -> list[str]:
    folder = Path("/run/netns")
    return [f"netns {p.name}" for p in folder.iterdir()] if folder.is_dir() else []


def _processes() -> list[str]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if any(name in words for name in _NAMES):
            found.append(f"process {folder.name} {words[:60]}")
    return found
