"""A sandbox as what enforces its policy needs it.

Owns: its form, and how it is read from a handle. Does not own: what is done to it
(:mod:`.enforcing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.edge.agent.client import AgentClient
from services.edge.drivers.base import Secret, StartSpec
from services.edge.drivers.container.folders import disk_of
from services.edge.machine.cgroups import Groups


@dataclass(frozen=True, slots=True)
class Target:
    """One sandbox, known by its container, a process in it and the agent."""

    uid: str
    project: str
    agent: AgentClient
    container: str
    pid: int
    groups: Groups
    secrets: Sequence[Secret] = ()
    quota: bool = False  # its disk is a project, which is kept by what it may call


def target_of(
    spec: StartSpec, data: Mapping[str, Any], *, agent: AgentClient, groups: Groups
) -> Target:
    """``data`` is what its handle keeps."""
    return Target(
        spec.uid, spec.project, agent, str(data["container"]), int(data["pid"]), groups,
        spec.secrets, "project" in disk_of(data),
    )  # fmt: skip
