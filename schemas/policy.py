"""A policy document: what a sandbox may reach and do, as users write it.

Owns: its shape and types. Does not own: what a rule means (:mod:`shared.policies`) or
what enforces it (:mod:`services.edge.policy`). Unlike in messages an unknown field is
an error: a protection that was misspelt must not be missing silently.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Preset = Literal["locked", "research", "build"]
Path = Annotated[str, Meta(min_length=1, max_length=4096)]
Rule = Annotated[str, Meta(min_length=1, max_length=255)]
StageName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$(?!\n)")]


class Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Base of the document and its parts."""


class Files(Part, frozen=True):
    """Absolute paths, as they are when the sandbox starts. ``read_only``: whole trees;
    ``hidden``: what is there cannot be seen or read; ``protected``: single files that
    stay as they are; ``watched``: files and folders whose changes are told and not denied.
    A path that ends in ``?`` may be missing."""

    read_only: Annotated[list[Path], Meta(max_length=64)] = []
    hidden: Annotated[list[Path], Meta(max_length=64)] = []
    protected: Annotated[list[Path], Meta(max_length=64)] = []
    watched: Annotated[list[Path], Meta(max_length=64)] = []


class Processes(Part, frozen=True):
    """``deny``: names of :data:`shared.policies.model.DENIABLE`, ``ioctl:0x…`` (a
    request number) or ``exec:/path``."""

    deny: Annotated[list[Rule], Meta(max_length=256)] = []


class Limits(Part, frozen=True):
    """``None``: not limited here. ``pids`` of the sandbox; ``open_files`` and
    ``file_mb`` (largest file) of one process; ``output_bytes`` kept of each stream of
    a command; ``wall_time_s`` from the sandbox's start; ``disk_mb`` and ``inodes`` of its
    writable layer."""

    pids: Annotated[int, Meta(ge=8, le=4_194_304)] | None = None
    open_files: Annotated[int, Meta(ge=16, le=1_048_576)] | None = None
    file_mb: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    output_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] | None = None
    wall_time_s: Annotated[float, Meta(gt=0, le=31_536_000)] | None = None
    disk_mb: Annotated[int, Meta(ge=1, le=16_777_216)] | None = None
    inodes: Annotated[int, Meta(ge=16)] | None = None


class Stage(Part, frozen=True):
    """What a stage changes: its network rules come over those of the document, its
    denials are added; ``None``: as in the document."""

    network: dict[Rule, bool] | None = None
    processes: Processes | None = None


class PolicyDocument(Part, frozen=True):
    """The whole document. ``network``: rule → allowed; what no rule allows is denied.
    ``require``: parts that must be enforced, by dotted name. ``stage``: the stage in
    force at the beginning."""

    preset: Preset | None = None
    network: dict[Rule, bool] = {}
    files: Files = Files()
    processes: Processes = Processes()
    resources: Limits = Limits()
    require: Annotated[list[Rule], Meta(max_length=64)] = []
    stages: dict[StageName, Stage] = {}
    stage: StageName | None = None
