"""Answers to clients that hand bytes over and fetch them.

Owns: whose bytes they are, by the subject, which the bus lets no one else use. Does not
own: files (``uploads``, ``exports``), grants (auth).
"""

from __future__ import annotations

import asyncio

from schemas.image import (
    BlobGet,
    BlobPiece,
    BlobPut,
    BlobState,
    ImageExport,
    ImageReply,
    ResolveItem,
)
from schemas.subjects import parse_blob
from services.imagesvc import environments, store
from services.imagesvc.exports import Environment, Exports
from services.imagesvc.names import parse_name
from services.imagesvc.settings import Settings
from services.imagesvc.uploads import Uploads
from shared.bus import Incoming
from shared.db import Database
from shared.errors import InvalidRequest
from shared.wire import from_wire


def owner(project: str, principal: str) -> str:
    """Whose an upload is."""
    return f"{project}/{principal}"


class Transfers:
    """The handlers of ``blob`` subjects and of exports."""

    def __init__(
        self, settings: Settings, db: Database, uploads: Uploads, exports: Exports
    ) -> None:
        self._settings = settings
        self._db = db
        self._uploads = uploads
        self._exports = exports

    async def put(self, piece: BlobPut, incoming: Incoming) -> BlobState:
        """Bytes of an upload."""
        whose = owner(*parse_blob(incoming.subject))
        return BlobState(size_bytes=await asyncio.to_thread(self._uploads.put, whose, piece))

    async def get(self, ask: BlobGet, incoming: Incoming) -> BlobPiece:
        """Bytes of an export."""
        project, _ = parse_blob(incoming.subject)
        return BlobPiece(data=await asyncio.to_thread(self._exports.piece, project, ask))

    async def export(self, query: ImageExport, _: Incoming) -> ImageReply:
        """An environment as an archive, or how far it is."""
        if len(set(query.names)) < len(query.names):
            raise InvalidRequest("a name is given twice", field="names")
        item = ResolveItem(names=query.names, projects=query.projects)
        names_max = self._settings.image_names_max
        async with self._db.transaction() as connection:
            found = await store.images(
                connection, environments.wanted([item], names_max=names_max)
            )
        resolved = environments.resolve(item, found, names_max=names_max, any_kind=True)
        if resolved.error is not None:
            raise from_wire(resolved.error)
        return await self._exports.get(
            Environment(
                project=query.projects[0], name=parse_name(query.names[-1]),
                layers=[layer.digest for layer in resolved.layers], config=resolved.config,
            )
        )  # fmt: skip
