"""dsec's SDK: sandboxes for training and evaluating agents.

    from libdsec import DSecClient, DSecContainerRunArgs

    async with DSecClient() as client:
        args = DSecContainerRunArgs(container_image="py:3.11", memory_limit_mb=4096)
        sandbox = await client.run_container(args, timeout=120)
        result = await sandbox.run_shell("pytest -q")
        await sandbox.stop()

``libdsec.sync`` has the same names for code without a loop of its own.
"""

from __future__ import annotations

from libdsec.args import (
    DSecContainerRunArgs,
    DSecMicroVMRunArgs,
    DSecRunArgs,
    DSecVMRunArgs,
)
from libdsec.client import DSecClient
from libdsec.errors import (
    BadPath,
    CapacityExhausted,
    Conflict,
    DeadlineExceeded,
    DirectoryNotEmpty,
    Divergence,
    DSecError,
    ExecFailed,
    ExecTimeout,
    ExpectEnded,
    ExpectTimeout,
    FileAlreadyExists,
    FileChanged,
    FileError,
    FileIsADirectory,
    FileNotADirectory,
    FileNotFound,
    FilePermissionDenied,
    Forbidden,
    InternalError,
    InvalidRequest,
    NoSpaceLeft,
    NotARegularFile,
    NotFound,
    OutcomeUnknown,
    PolicyDenied,
    PortError,
    PortRefused,
    PortReset,
    QuotaExceeded,
    SandboxDied,
    StdinClosed,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from libdsec.files import Files
from libdsec.forward import FastForward
from libdsec.interaction import Found, Interaction
from libdsec.jobs import Job
from libdsec.ports import Connection, LocalAddress, Port
from libdsec.process import Output, Process
from libdsec.replay import Difference, Replay
from libdsec.results import Event, ExecResult, FileChange, FileInfo, Info, TreeCopy
from libdsec.sandbox import Sandbox
from libdsec.sessions import Session
from libdsec.snapshots import Layer, Snapshot
from libdsec.trajectory import Provenance, Trajectory, TrajectoryRecord
from libdsec.verifying import Verifying

__all__ = [
    "BadPath",
    "CapacityExhausted",
    "Conflict",
    "Connection",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DSecMicroVMRunArgs",
    "DSecRunArgs",
    "DSecVMRunArgs",
    "DeadlineExceeded",
    "Difference",
    "DirectoryNotEmpty",
    "Divergence",
    "Event",
    "ExecFailed",
    "ExecResult",
    "ExecTimeout",
    "ExpectEnded",
    "ExpectTimeout",
    "FastForward",
    "FileAlreadyExists",
    "FileChange",
    "FileChanged",
    "FileError",
    "FileInfo",
    "FileIsADirectory",
    "FileNotADirectory",
    "FileNotFound",
    "FilePermissionDenied",
    "Files",
    "Forbidden",
    "Found",
    "Info",
    "Interaction",
    "InternalError",
    "InvalidRequest",
    "Job",
    "Layer",
    "LocalAddress",
    "NoSpaceLeft",
    "NotARegularFile",
    "NotFound",
    "OutcomeUnknown",
    "Output",
    "PolicyDenied",
    "Port",
    "PortError",
    "PortRefused",
    "PortReset",
    "Process",
    "Provenance",
    "QuotaExceeded",
    "Replay",
    "Sandbox",
    "SandboxDied",
    "Session",
    "Snapshot",
    "StdinClosed",
    "Trajectory",
    "TrajectoryRecord",
    "TreeCopy",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Verifying",
]
