"""What a run left on the machine: everything that carries its node's or folder's mark.

Owns: containers, mounts, cgroups, network namespaces and processes of one run. Does
not own: rows in the database (the client's list says that), or other systems that run
on the same machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import docker
from docker.errors import DockerException

from services.local import node_names

_CGROUP_DEPTH = 7


def leftovers(state_dir: Path) -> list[str]:
    """One line per thing that is still there of the system kept in ``state_dir``."""
    state_dir = state_dir.resolve()
    (node,) = node_names(state_dir, 1)
    marks = (node, str(state_dir))
    found = [*_containers(node), *_mounts(marks), *_cgroups(node), *_processes(marks)]
    return [*found, *_namespaces(node)]


def _containers(node: str) -> Iterable[str]:
    try:
        engine = docker.from_env(timeout=30)
        found = engine.api.containers(all=True, filters={"label": f"dsec.node={node}"})
    except DockerException as error:
        return [f"containers: Docker Engine does not say: {error}"]
    return [f"container {one['Id'][:12]}" for one in found]


def _mounts(marks: tuple[str, ...]) -> Iterable[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [f"mount {line.split()[1]}" for line in lines if any(m in line for m in marks)]


def _cgroups(node: str) -> Iterable[str]:
    for root, folders, _ in os.walk("/sys/fs/cgroup"):
        if root.count("/") > _CGROUP_DEPTH:
            folders.clear()
        # the node's own group stays where Docker made it; what is in it must be gone
        if node in root:
            yield from (f"cgroup {root}/{name}" for name in folders)


def _namespaces(node: str) -> Iterable[str]:
    folder = Path("/run/netns")
    names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
    return [f"netns {name}" for name in names if node in name]


def _processes(marks: tuple[str, ...]) -> Iterable[str]:
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        try:
            told = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            words = told.replace(b"\0", b" ").decode(errors="replace")
            words += " " + os.readlink(folder / "cwd")
        except OSError:
            continue  # it ended while we looked, or is a kernel thread
        if any(mark in words for mark in marks):
            yield f"process {folder.name} {words[:60]}"
