"""From a running sandbox to an image: its own layers and one of what it changed.

Owns: the order of steps: where it runs, a place for the layer, the edge's work, leases,
taking the layer over, where it comes from. Does not own: copying and packing (the edge),
names' rows (``store``), answers (``handlers``).

Nothing has a name before everything is in the store, and what the edge says is believed
only of the layer's content and of the policy in force: project, parents and person come
from the command and the scheduler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import msgspec

from schemas.control import PackReply, PackRequest, UploadTarget
from schemas.image import (
    ImageCommand,
    LayerProvenance,
    Origin,
    OriginQuery,
    ScrubPattern,
    SnapshotCreate,
)
from schemas.sandbox import ImageConfig
from schemas.subjects import rpc
from services.imagesvc import edges
from services.imagesvc.names import ImageName, parse_name
from shared import ids, policies
from shared.blobs.base import BlobStore, Incoming
from shared.blobs.layout import LayerManifest
from shared.bus import Bus
from shared.errors import Internal, InvalidRequest, Unsupported

SNAPSHOTS = "snapshot"
"""Names of snapshots that were given none: ``snapshot/<request id>``."""
ASK_S = 10.0

Keep = Callable[[Sequence[LayerManifest]], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is to be registered. ``layers`` are bottom first."""

    layers: list[LayerManifest]
    config: ImageConfig
    provenance: LayerProvenance


def name_of(snapshot: SnapshotCreate) -> ImageName:
    """Raises ``InvalidRequest`` (``name``)."""
    return parse_name(snapshot.name or f"{SNAPSHOTS}/{snapshot.request_id}")


class Snapshots:
    """Takes snapshots into ``blobs``."""

    def __init__(
        self, bus: Bus, blobs: BlobStore, *, scrub: Mapping[str, Sequence[str]]
    ) -> None:
        self._bus = bus
        self._blobs = blobs
        self._scrub = scrub

    async def take(self, command: ImageCommand, asked: SnapshotCreate, keep: Keep) -> Snapshot:
        """``keep`` is told of the layers before the new one is stored. Raises what is
        wrong with the request, the sandbox, its node or the store; then nothing is left
        of it but what leases will let go."""
        if asked.memory:
            raise Unsupported("containers have snapshots of their disk only", field="memory")
        origin = await self._bus.request(
            rpc("scheduler", "origin"), OriginQuery(project=command.project, uid=asked.uid),
            Origin, timeout_s=ASK_S,
        )  # fmt: skip
        digests = [one.digest for one in origin.resolved.layers]
        parents = [await asyncio.to_thread(self._blobs.manifest, one) for one in digests]
        place = self._blobs.incoming()
        incoming = await asyncio.to_thread(place.__enter__)
        try:
            reply = await self._packed(origin, command, asked, incoming)
            made = _manifest(reply)
            await keep([*parents, made])
            stored = await asyncio.to_thread(self._blobs.adopt, made, incoming)
        finally:
            await asyncio.shield(asyncio.to_thread(_leave, place))
        provenance = _provenance(command, asked, origin, reply, stored.digest)
        return Snapshot([*parents, stored], origin.resolved.image, provenance)

    async def _packed(
        self, origin: Origin, command: ImageCommand, asked: SnapshotCreate, incoming: Incoming
    ) -> PackReply:
        folder = None if incoming.folder is None else str(incoming.folder)
        request = PackRequest(
            op_id=ids.new(), target=UploadTarget(folder=folder, urls=dict(incoming.urls)),
            scrub=asked.scrub, remove=left_out(asked, command.projects, self._scrub),
        )  # fmt: skip
        return await edges.pack(self._bus, origin, command.project, request)


def scrub_rules(text: str) -> dict[str, list[str]]:
    """The setting ``image_scrub``. Raises ``InvalidRequest``."""
    try:
        rules = msgspec.json.decode(text, type=dict[str, list[ScrubPattern]])
    except msgspec.DecodeError as error:
        text = f"DSEC_IMAGE_SCRUB: {error}"
        raise InvalidRequest(text, field="image_scrub") from error
    return rules


def left_out(
    asked: SnapshotCreate, projects: Sequence[str], rules: Mapping[str, Sequence[str]]
) -> list[str]:
    """What to leave out besides residue: what the caller names, and in a scrub what the
    project and those above it do."""
    given = projects if asked.scrub else ()
    return [*asked.remove, *(pattern for one in given for pattern in rules.get(one, ()))]


def _leave(place: AbstractContextManager[Incoming]) -> None:
    place.__exit__(None, None, None)


def _manifest(reply: PackReply) -> LayerManifest:
    try:
        return msgspec.convert(reply.manifest, LayerManifest)
    except msgspec.ValidationError as error:
        raise Internal(f"the edge's manifest cannot be read: {error}") from error


def _provenance(
    command: ImageCommand, asked: SnapshotCreate, origin: Origin, reply: PackReply, layer: str
) -> LayerProvenance:
    spec = origin.resolved.spec
    if reply.spec is not None:
        spec = policies.carried(spec, reply.spec)
    return LayerProvenance(
        sandbox=asked.uid, principal=command.principal, node=origin.node, at=time.time(),
        layer=layer, parents=[one.digest for one in origin.resolved.layers], job=origin.job,
        spec=spec, frozen_s=reply.frozen_s, scrubbed=asked.scrub,
        removed=reply.removed, removed_count=reply.removed_count,
    )  # fmt: skip
