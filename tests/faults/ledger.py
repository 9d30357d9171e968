"""What a node holds on the machine: containers, processes, groups, mounts, folders.

Owns: looking, from outside, at what the edge made. Does not own: judging it; tests
compare two looks.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import docker
import psutil

from tests.faults.conftest import World

CGROUPS = Path("/sys/fs/cgroup")


@dataclass
class Held:
    """Of one sandbox: its folder, its container, its groups, its processes."""

    folder: Path
    container: str
    groups: list[Path] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)

    def left(self) -> list[str]:
        """What of it still lives or holds data. Empty groups are the engine's, and so is to
        reap what is dead, which has no command line any more."""
        found = [f"process {pid}" for pid in self.pids if _command_line(pid)]
        return [*found, f"folder {self.folder}"] if self.folder.exists() else found

    def in_books(self) -> bool:
        """Whether the engine still lists the container, or the kernel a group of it."""
        listed = any(c["Id"] == self.container for c in _engine().containers(all=True))
        return listed or any(group.exists() for group in self.groups)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _engine() -> docker.APIClient:
    return docker.APIClient(timeout=60)


def sandbox_folders(world: World) -> list[Path]:
    """A folder for each sandbox of the container driver."""
    return [p.parent for p in world.node_dir.glob("**/sandboxes/*/meta.json")]


def held(world: World, uid: str) -> Held:
    """What the running container ``uid`` holds."""
    (folder,) = [f for f in sandbox_folders(world) if f.name == uid]
    container = json.loads((folder / "meta.json").read_text())["container"]
    one = Held(folder, container)
    for root, folders, _ in os.walk(CGROUPS):
        one.groups += [Path(root, name) for name in folders if container in name]
    for group in one.groups:
        for file in group.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):  # a command's group may go meanwhile
                one.pids |= {int(pid) for pid in file.read_text().split()}
    assert one.groups and one.pids
    return one


def containers(world: World) -> int:
    """Containers of the node, warm ones included."""
    return len(_engine().containers(all=True, filters={"label": f"dsec.node={world.node}"}))


def edge_process(world: World) -> psutil.Process:
    """The edge."""
    pid = world.system.pids()[world.edge]
    assert pid is not None
    return psutil.Process(pid)


def measure(world: World) -> dict[str, int]:
    """Numbers that must not grow with the number of sandboxes that came and went."""
    process = edge_process(world)
    mounts = Path(f"/proc/{process.pid}/mountinfo").read_text().splitlines()
    ours = [line for line in mounts if "/docker/" not in line]  # those count as containers
    groups = [root for root, _, _ in os.walk(CGROUPS) if world.node in root]
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "children": len(process.children(recursive=True)),
        "mounts": len(ours),
        "maps": Path(f"/proc/{process.pid}/maps").read_text().count("\n") // 50,
        "groups": len(groups),
        "containers": containers(world),
        "files": sum(len(names) for _, _, names in os.walk(world.node_dir)),
    }
