"""What is asked of a sandbox as a whole at its edge's door: to stand still, to change its
rules, to wait for a verifier, to become a layer. The way is that of :mod:`schemas.exec`."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from schemas.base import Message, Versioned, WireError
from schemas.exec import LEASE_MAX_S, OpId
from schemas.image import Removed
from schemas.sandbox import SandboxSpec


class StandingRequest(Versioned, frozen=True):
    """verbs ``pause`` and ``resume``."""

    op_id: OpId


class StandingReply(Versioned, frozen=True):
    """It stands still, or goes on: ``state``. ``failure``: it was tried and could not be
    done, and the sandbox is as before."""

    op_id: OpId
    state: str = ""
    failure: WireError | None = None
    error: WireError | None = None


class PolicyRequest(Versioned, frozen=True):
    """verb ``policy``: other rules for a running (or paused) sandbox. What is ``None``
    stays: ``network_rules`` and ``policy`` replace those of the spec, ``stage`` (of the
    document; empty: none) is put into force, ``offline`` lets nothing out whatever the
    rules say. All of it or nothing."""

    op_id: OpId
    network_rules: dict[Annotated[str, Meta(min_length=1, max_length=255)], bool] | None = None
    policy: dict[str, Any] | None = None
    stage: Annotated[str, Meta(max_length=63)] | None = None
    offline: bool | None = None


class PolicyReply(Versioned, frozen=True):
    """It is in force; ``enforcement`` says by what."""

    op_id: OpId
    enforcement: dict[str, str] = {}
    error: WireError | None = None


class LeaseRequest(Versioned, frozen=True):
    """verb ``verify``: takes or renews the ``lease`` (a name that its holder made up) of a
    verifier for ``lease_s`` seconds; 0 gives it back. While it is held no time limit ends
    the sandbox, within the node's bound. One holder at a time: another's is a
    ``conflict``. ``alone``: everything that runs in the sandbox is killed, and until the
    lease ends only operations with ``Dsec-Lease`` are let in. ``offline``: from here on
    nothing leaves the sandbox, whatever its rules say. It resumes nothing."""

    op_id: OpId
    lease: OpId
    lease_s: Annotated[float, Meta(ge=0, le=LEASE_MAX_S)]
    alone: bool = False
    offline: bool = False


class LeaseReply(Versioned, frozen=True):
    """``held_s``: how long the lease is held without a renewal; ``left_s``, how long it can
    be with renewals."""

    op_id: OpId
    held_s: float = 0.0
    left_s: float = 0.0
    error: WireError | None = None


class UploadTarget(Message, frozen=True):
    """Where a node puts the files of a layer: into an empty ``folder`` that it shares with
    imagesvc, or by PUT to one of ``urls`` each (by file name)."""

    folder: str | None = None
    urls: dict[str, str] = {}


class PackRequest(Versioned, frozen=True):
    """verb ``pack``, of imagesvc only: what the sandbox changed becomes a layer at
    ``target``. ``scrub`` and ``remove`` as of ``SnapshotCreate``."""

    op_id: OpId
    target: UploadTarget
    scrub: bool = False
    remove: list[str] = []


class PackReply(Versioned, frozen=True):
    """The final frame of ``pack``. ``manifest``: the layer's, as stores keep it. ``spec``:
    the sandbox's, under the policy that it is under now."""

    op_id: OpId
    manifest: dict[str, Any] = {}
    frozen_s: float = 0.0
    removed: list[Removed] = []
    removed_count: int = 0
    error: WireError | None = None
    spec: SandboxSpec | None = None
