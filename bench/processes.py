"""What processes cost: CPU time and resident memory, read from ``/proc``.

Owns: finding the agents of one node among everybody's. Does not own: what runs.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import docker

from services.edge.drivers.container.engine import LABEL_NODE

HZ = os.sysconf("SC_CLK_TCK")
AGENT = "aether"


def agents(node: str) -> set[int]:
    """The agents (first processes) of the node's containers."""
    client = docker.from_env()
    try:
        found = client.api.containers(filters={"label": f"{LABEL_NODE}={node}"})
        facts = [client.api.inspect_container(c["Id"])["State"]["Pid"] for c in found]
    finally:
        client.close()
    return {pid for pid in facts if pid}


def cpu_s(roots: Mapping[str, int]) -> dict[str, float]:
    """Seconds of CPU that each root and all below it have used, children that have
    ended included. A root's own descendants that are roots too are not counted twice."""
    children, used = _table()
    figures = {}
    for name, root in roots.items():
        total, todo = 0.0, [root]
        while todo:
            pid = todo.pop()
            total += used.get(pid, 0.0)
            todo += [c for c in children[pid] if c not in roots.values()]
        figures[name] = total
    return figures


def _table() -> tuple[dict[int, list[int]], dict[int, float]]:
    children: dict[int, list[int]] = defaultdict(list)
    used: dict[int, float] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        children[int(fields[1])].append(int(entry))
        used[int(entry)] = sum(map(int, fields[11:15])) / HZ
    return children, used


def rss_mb(pid: int) -> float:
    """Resident memory of one process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def session_memory(node: str) -> dict[str, float]:
    """Of the node's agents with a shell: what the agent with its helpers keeps resident
    (``agent_rss_mb`` its own, ``agent_pss_mb`` all of them by their share), and what the
    image's shell does (``shell_pss_mb``)."""
    children, _ = _table()
    for agent in agents(node):
        below = children[agent]
        shells = [pid for pid in below if _name(pid) != AGENT]
        if shells:
            helpers = [pid for pid in below if pid not in shells]
            return {
                "agent_rss_mb": round(rss_mb(agent), 2),
                "agent_pss_mb": round(sum(map(_pss_mb, [agent, *helpers])), 2),
                "shell_pss_mb": round(sum(map(_pss_mb, shells)), 2),
            }
    raise RuntimeError("no agent has a session")


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _pss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1e3
    return 0.0
