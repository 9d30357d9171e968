"""Which classes have a synchronous face, and the instance attributes it shows."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from libdsec import audit, images, jobs, managers, rollout, secrets, verify
from libdsec.client import DSecClient
from libdsec.files import Files
from libdsec.forward import FastForward
from libdsec.interaction import Interaction
from libdsec.ports import Connection, Port
from libdsec.process import Output, Process
from libdsec.sandbox import Sandbox
from libdsec.sessions import Session
from libdsec.trajectory import Trajectory
from libdsec.verifying import Verifying

Faces = dict[str, tuple[type, tuple[str, ...]]]

FACES: Faces = {
    "Images": (images.Images, ()),
    "Projects": (managers.Projects, ()),
    "Keys": (managers.Keys, ()),
    "Grants": (managers.Grants, ()),
    "Quotas": (managers.Quotas, ()),
    "Nodes": (managers.Nodes, ()),
    "Policies": (managers.Policies, ()),
    "Secrets": (secrets.Secrets, ()),
    "Audit": (audit.Audit, ()),
    "Jobs": (jobs.Jobs, ()),
    "Job": (jobs.Job, ("id", "lease_s", "on_lost", "sandboxes", "epoch", "lost")),
    "Files": (Files, ()),
    "Output": (Output, ()),
    "Connection": (Connection, ("port",)),
    "Port": (Port, ("port",)),
    "Process": (Process, ("stdout", "stderr")),
    "Interaction": (Interaction, ("process",)),
    "Session": (Session, ("name",)),
    "Sandbox": (Sandbox, ("uid", "project", "state", "job", "labels", "files")),
    "FastForward": (
        FastForward,
        ("uid", "project", "state", "job", "labels", "files", "lane", "step", "replayed"),
    ),
    "Verifying": (
        Verifying,
        ("uid", "project", "state", "job", "labels", "files", "lease_s", "lost"),
    ),
    "Trajectory": (Trajectory, ()),
    "DSecClient": (
        DSecClient,
        (
            "images", "projects", "keys", "grants", "quotas", "nodes", "audit", "jobs", "secrets",
            "policies",
        ),
    ),
}
"""Public async classes by name, with the instance attributes they show."""


@dataclass(frozen=True)
class Part:
    """A module beside the client: what of it waits, and its own classes. Everything else
    that it exports is the same in both faces."""

    source: ModuleType
    functions: tuple[str, ...]
    faces: Faces


MODULES = {
    "rollout": Part(
        rollout, ("attach", "here", "submit"),
        {
            "Rollout": (
                rollout.Rollout, ("client", "run_id", "index", "prompt", "sample")
            ),
            "Run": (rollout.Run, ("run_id", "worker")),
        },
    ),
    "verify": Part(verify, ("grade", "preflight"), {}),
}  # fmt: skip
"""Modules with a synchronous face."""
