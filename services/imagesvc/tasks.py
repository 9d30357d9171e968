"""One command to imagesvc: what it says, its answers, its progress. Pure.

Does not own: carrying it out (``handlers``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from schemas.base import BadMessage, decode, encode
from schemas.image import (
    ImageCommand,
    ImageCreate,
    ImageDelete,
    ImageInfo,
    ImageReply,
    ImageTag,
    Kind,
    LayerProvenance,
    SnapshotCreate,
)
from schemas.sandbox import ImageConfig
from services.imagesvc.meter import ImportProgress
from services.imagesvc.names import ImageName
from services.imagesvc.transfers import owner
from shared.blobs.layout import LayerManifest
from shared.consumer import Received
from shared.errors import DsecError
from shared.wire import to_wire


@dataclass(frozen=True, slots=True)
class Task:
    """One stored command."""

    command: ImageCommand
    message: Received

    @property
    def reply_to(self) -> str | None:
        return self.message.reply_to or self.command.reply_to

    @property
    def request(self) -> ImageCreate | ImageDelete | ImageTag | SnapshotCreate | None:
        command = self.command
        return command.create or command.delete or command.tag or command.snapshot

    @property
    def request_id(self) -> str:
        return self.request.request_id if self.request else ""

    @property
    def sha256(self) -> bytes:
        """Of what is asked for: the same request id must mean the same."""
        return hashlib.sha256(encode(self.request)).digest()

    @property
    def owner(self) -> str:
        """Whose uploads it may use."""
        return owner(self.command.project, self.command.principal)


@dataclass(frozen=True, slots=True)
class Image:
    """What a name is to mean. ``layers`` are in the store, bottom first."""

    name: ImageName
    kind: Kind
    config: ImageConfig
    layers: Sequence[LayerManifest]
    provenance: LayerProvenance | None = None


class Reporter:
    """Keeps the latest state of an import."""

    def __init__(self) -> None:
        self.state: ImportProgress | None = None

    def __call__(self, state: ImportProgress) -> None:
        self.state = state


def share(state: ImportProgress) -> float:
    """Progress from 0 to 1; nothing is known before the source was read."""
    if not state.total_bytes:
        return 1.0 if state.stage == "storing" else 0.0
    return min(1.0, state.done_bytes / state.total_bytes)


def read_command(message: Received) -> ImageCommand:
    command = decode(message.data, ImageCommand)
    requests = (command.create, command.delete, command.tag, command.snapshot)
    if sum(request is not None for request in requests) != 1:
        raise BadMessage("an image command creates, deletes, tags or packs", field="create")
    return command


def answered_with(task: Task, image: ImageInfo | None = None) -> bytes:
    return encode(ImageReply(request_id=task.request_id, image=image))


def refused(task: Task, error: DsecError) -> bytes:
    return encode(ImageReply(request_id=task.request_id, error=to_wire(error)))
